"""MXNet's distributed key-value store: a server sums what the workers push, and may run the optimizer on it."""

import mxnet
import numpy

import gradients

LEARNING_RATE = 0.01
MOMENTUM = 0.9
# The difference of some steps in f32 from the same steps in f64, for parameters below about ten.
TOLERANCE = 1e-3


class Peer:
    def __init__(self, task: dict):
        self.workers = task["workers"]
        self.version = f"mxnet {mxnet.__version__}"
        self.store = mxnet.kv.create("dist_sync")
        self.is_on_server = task["optimizer"] == "nesterov"
        if self.is_on_server:
            # The same as gluon.Trainer with update_on_kvstore: the server divides the workers' sum.
            optimizer = mxnet.optimizer.NAG(
                learning_rate=LEARNING_RATE, momentum=MOMENTUM, rescale_grad=1.0 / self.workers
            )
            self.store.set_optimizer(optimizer)
        self.layout = gradients.Layout(task["elements"])
        whole = self.layout.buffer()
        gradients.fill(self.layout, self.store.rank, whole)
        spans = self.layout.spans
        self.pristine = [mxnet.nd.array(whole[start:end], dtype="float32") for start, end in spans]
        self.gradients = [pristine.copy() for pristine in self.pristine]
        self.parameters = [mxnet.nd.zeros(end - start) for start, end in spans]
        self.store.init(list(range(len(spans))), self.parameters)
        self.exchanges = 0
        mxnet.nd.waitall()

    def prepare(self, form: str) -> None:
        # A pull writes into the pushed memory first, and copies from there into its output.
        for pristine, gradient in zip(self.pristine, self.gradients):
            pristine.copyto(gradient)
        mxnet.nd.waitall()

    def exchange(self, form: str) -> None:
        # The order and the priorities of gluon.Trainer: last layers are ready first, first layers are needed first.
        for key in reversed(range(len(self.gradients))):
            self.store.push(key, self.gradients[key], priority=-key)
            self.store.pull(key, out=self.parameters[key], priority=-key)
        mxnet.nd.waitall()
        self.exchanges += 1

    def check(self, form: str) -> dict:
        for parameter in self.parameters:
            parameter[:] = numpy.nan
        self.prepare(form)
        self.exchange(form)
        factor = nesterov_factor(self.exchanges) / self.workers if self.is_on_server else 1.0
        tolerance = TOLERANCE if self.is_on_server else 0.0
        tensors = [parameter.asnumpy() for parameter in self.parameters]
        return gradients.compare(self.layout, self.workers, tensors, lambda total: total * factor, tolerance)

    def leave(self) -> None:
        # The last store that is deleted ends the servers.
        del self.store


def nesterov_factor(steps: int) -> float:
    """The parameters after this many steps from 0 with the same gradient in each, in units of that gradient."""
    velocity, position = 0.0, 0.0
    for _ in range(steps):
        velocity = MOMENTUM * velocity + 1.0
        position -= LEARNING_RATE * (1.0 + MOMENTUM * velocity)
    return position
