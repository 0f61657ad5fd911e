"""Layers whose gradients ranks exchange as factors, and whose parameters each rank updates itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paramhub import _native
from paramhub.errors import MisuseError
from paramhub.torch import trace
from paramhub.torch._capture import Capture, Factors
from paramhub.torch._exchange import Exchange
from paramhub.torch._staged_handle import StagedHandle
from paramhub.torch._staging import Stage
from paramhub.torch._tensors import memory_range


class SendQueue:
    """The layers of one optimizer in the order in which they are sent: the order in which backward completed them in rank
    0's first step. It is the same at all ranks, so a layer waits for the layers before it, as DDP's buckets do."""

    def __init__(self) -> None:
        self.layers: list[FactorLayer] = []
        self._next = 0

    def advance(self) -> None:
        """Sends the ready layers at the front of the queue."""
        while self._next < len(self.layers) and self.layers[self._next].is_ready:
            self._next += 1
            self.layers[self._next - 1].push()

    def flush(self) -> None:
        """Sends the rest of the step's layers, once all gradients are complete. A layer without a gradient is not exchanged,
        at any rank."""
        while self._next < len(self.layers):
            self._next += 1
            if self.layers[self._next - 1].has_begun:
                self.layers[self._next - 1].push()

    def complete(self, used: Sequence[bool]) -> None:
        """Completes an interrupted step: sends the layers that were not sent, without samples. A layer that no rank has used is
        left out; ``used`` is by parameter."""
        for layer in self.layers:
            if not layer.is_sent and any(used[exchange.number] for exchange in layer.parts):
                layer.push_none()

    def finish_step(self) -> None:
        self._next = 0
        for layer in self.layers:
            layer.finish_step()


class FactorLayer:
    """One layer, which sends its factors when the gradients of its weight and its bias are complete."""

    def __init__(self, number: int, samples: int, capture: Capture, queue: SendQueue) -> None:
        self.number = number
        self.capture = capture
        self.is_ready = False
        self.is_sent = False
        """True if this rank has sent the factors of this step."""
        self._samples = samples
        self._queue = queue
        self.parts = [capture.weight, *([capture.bias] if capture.bias is not None else [])]
        self._left = 0
        self._steps = 0
        self._host: _HostCopies | None = None
        for exchange in self.parts:
            exchange.layer = self

    @property
    def has_begun(self) -> bool:
        """Returns whether the gradient of its weight or its bias is complete in this step."""
        return self._left > 0

    def leave(self, exchange: Exchange) -> None:
        """Called when the gradient of the weight or of the bias is complete."""
        if exchange is self.capture.weight and not self.capture.is_whole:
            raise self._wrong()
        self._left += 1
        if self._left == len(self.parts):
            self.is_ready = True
            self._queue.advance()

    def push(self) -> None:
        """Sends the layer's factors, and begins to receive its parameters."""
        if self._left < len(self.parts):
            raise MisuseError(
                f"of weight and bias of layer {self.capture.name!r} one has a gradient and one has none, but both go by their "
                "factors: freeze parameters before HubOptimizer is made, or give it scheme='hub'"
            )
        dtype = self.capture.dtype
        if wider := [kind for kind in self.capture.dtypes if torch.promote_types(kind, dtype) != dtype]:
            raise MisuseError(
                f"layer {self.capture.name!r} works in {wider[0]} in this step, but its factors travel in {dtype}, in which all "
                "ranks had it in the first: run all training under one autocast, or give HubOptimizer scheme='hub'"
            )
        factors = self.capture.take()
        count = factors.inputs.shape[0]
        if count > self._samples:
            raise MisuseError(
                f"layer {self.capture.name!r} has {count} samples in this step, but was planned for {self._samples}, the most "
                "that a rank had in the first step: begin with a step that is as large as any, or give HubOptimizer samples= "
                "with the most there may be, or scheme='hub'"
            )
        of_weight, *of_bias = [exchange.parameter.grad for exchange in self.parts]
        row = self._row()
        # A rank without a gradient has no factors, so there is nothing to compare.
        self._receive(self._send(factors, row, [of_weight[row], *of_bias] if of_weight is not None else []))

    def push_none(self) -> None:
        """Sends factors without samples, even if there are gradients."""
        for exchange in self.parts:
            exchange.wait()
        self.capture.forget()
        self._receive(self._send(self.capture.take(), self._row(), []))
        for exchange in self.parts:
            if not exchange.has_left:
                exchange.renew_version()
                exchange.count()

    def _receive(self, handle: _native.Handle | StagedHandle) -> None:
        """Stores the request for the new parameters as that of weight and bias."""
        self.is_sent = True
        self._steps += 1
        for exchange in self.parts:
            exchange.handle = handle
        if trace.active:
            trace.request(self.capture.weight.name, handle)

    def finish_step(self) -> None:
        self.is_ready = self.is_sent = False
        self._left = 0
        self.capture.forget()

    def _send(
        self, factors: Factors, row: slice, compared: Sequence[torch.Tensor]
    ) -> _native.Handle | StagedHandle:
        """Sends the factors, through host memory if they are on a device. ``compared`` is one row of the weight's gradient and
        the whole gradient of the bias. They must equal the gradients that the factors make."""
        stage = self.capture.weight.step.stage
        if stage is None:
            return self._hand_in(factors, row, compared, [exchange.memory for exchange in self.parts])
        if self._host is None:
            self._host = _HostCopies(stage, self.capture, self._samples)
        on_host, gradients = self._host.of(factors, len(compared))
        copies = [
            (on_host.inputs, factors.inputs),
            (on_host.output_gradients, factors.output_gradients),
            *zip(gradients, compared, strict=True),
        ]
        received = [stage.parameters[exchange.number] for exchange in self.parts]
        copies_back = [(exchange.flat, memory) for exchange, memory in zip(self.parts, received, strict=True)]
        return stage.exchange(copies, lambda: self._hand_in(on_host, row, gradients, received), copies_back)

    def _hand_in(
        self, factors: Factors, row: slice, compared: Sequence[torch.Tensor], received: Sequence[torch.Tensor]
    ) -> _native.Handle:
        """Checks ``compared`` and submits the request. All tensors are on the host."""
        if compared and not factors.make(compared[0], compared[1] if len(compared) > 1 else None, row):
            raise self._wrong()
        ranges = [memory_range(memory) for memory in received]
        return self.capture.weight.step.job.push_factors(
            self.number,
            (memory_range(factors.inputs), memory_range(factors.output_gradients)),
            (ranges[0], ranges[1] if len(ranges) > 1 else None),
            received,
        )

    def _row(self) -> slice:
        """The row of the weight's gradient that is compared in this step. To compare one row costs next to nothing, and is
        enough: if the gradient is not the product of its factors, nearly all of its rows differ."""
        row = self._steps * 0x9E3779B1 % self.capture.outputs
        return slice(row, row + 1)

    def _wrong(self) -> MisuseError:
        return MisuseError(
            f"the gradient of {self.capture.weight.name!r} or its bias is not what this step's inputs and output gradients of "
            f"layer {self.capture.name!r} make, although it was in the first step: it was changed or put there by hand, not "
            "cleared after the last step, or comes from elsewhere, too, or the layer is in code that was compiled since. Leave "
            "that out, or give HubOptimizer scheme='hub'"
        )


class _HostCopies:
    """Host memory for copies of a device's factors and of the gradients to compare them with. Each step uses it anew."""

    def __init__(self, stage: Stage, capture: Capture, samples: int) -> None:
        dtype = capture.weight.dtype
        self._inputs = stage.streams.empty((samples, capture.inputs), capture.dtype)
        self._output_gradients = stage.streams.empty((samples, capture.outputs), capture.dtype)
        self._gradients = [
            stage.streams.empty(shape, dtype) for shape in ((1, capture.inputs), (capture.outputs,))
        ]

    def of(self, factors: Factors, compared: int) -> tuple[Factors, list[torch.Tensor]]:
        """Host memory for the samples of ``factors``, and for as many gradients as ``compared`` says."""
        count = factors.inputs.shape[0]
        rows = self._inputs[:count], self._output_gradients[:count]
        return Factors(*rows, factors.tolerance, factors.tiny), self._gradients[:compared]
