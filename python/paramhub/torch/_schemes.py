"""The schemes of a model's Linears: exchange through the hub, or as factors where that moves fewer bytes.

The choice needs data of a step: how many samples it has, and whether a layer's inputs and output gradients make all of its
gradient. So the first step goes through the hub, and each rank observes it. Then the ranks agree and open another job, whose
plan says which layers are exchanged as factors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from paramhub import _native
from paramhub.errors import MisuseError
from paramhub.torch import _optimizer_state
from paramhub.torch._capture import Capture
from paramhub.torch._exchange import Exchange
from paramhub.torch._factor_layers import FactorLayer, SendQueue
from paramhub.torch._log import log
from paramhub.torch._world import World

NAMED_MAX = 6
"""The most layers that a printed line names."""
CHOICES = ("hub", "factors", "auto")
HALVES = {torch.bfloat16: "bf16", torch.float16: "f16"}
HALVES_BY_NAME = {name: dtype for dtype, name in HALVES.items()}


class Schemes:
    """The schemes of one optimizer's layers."""

    def __init__(
        self,
        world: World,
        model: torch.nn.Module,
        exchanges: Sequence[Exchange],
        asked: str,
        samples: int | Mapping[str, int] | None,
        why_not: tuple[str, str] | None,
    ) -> None:
        """``why_not`` says why none of its layers can be exchanged as factors, if so: a message, and the reason alone."""
        if asked not in CHOICES:
            raise MisuseError(
                f"scheme is {', '.join(map(repr, CHOICES[:-1]))} or {CHOICES[-1]!r}, not {asked!r}"
            )
        if asked == "factors" and why_not is not None:
            raise MisuseError(why_not[0])
        self._world = world
        self._exchanges = exchanges
        self._asked = asked
        self._queue = SendQueue()
        self._captures: dict[str, Capture] = {}
        self._order: list[str] = []
        self.found: dict[str, tuple[str, str]] = {}
        """The scheme of each Linear and the reason for it, by the Linear's name."""
        self.settings: dict[str, Any] = {}
        """The layers and schemes in the settings of the job, on which the ranks have agreed."""
        self.is_observing = False
        if asked == "hub":
            return
        linears = Linears(model, exchanges)
        self._most = _most_samples(samples, linears)
        self.found = {name: ("hub", why_not[1] if why_not else why) for name, why in linears.refused.items()}
        if why_not is not None:
            self.found |= dict.fromkeys(linears.taken, ("hub", why_not[1]))
            self._print()
            return
        if asked == "auto" and world.size == 1:
            # With one rank nothing is sent.
            return
        for name, (module, weight, bias) in linears.taken.items():
            self._captures[name] = Capture(name, module, weight, bias)
        self.is_observing = True

    def conclude(self) -> bool:
        """Called after the first step: the ranks agree on the layers. Returns whether these need another job."""
        self.is_observing = False
        own = {name: _observed(capture) for name, capture in self._captures.items()}
        met = sorted(
            (turn, name) for name, capture in self._captures.items() if (turn := capture.turn) is not None
        )
        report = json.dumps({"layers": own, "order": [name for _, name in met]})
        reports = [
            json.loads(text) for text in self._world.allgather_text(self._world.label("schemes"), report)
        ]
        layers = []
        for name in list(self._captures):
            seen = [
                report["layers"].get(name, [0, None, "another rank's model has no such layer"])
                for report in reports
            ]
            samples = max(samples for samples, _, _ in seen)
            kinds = {kind for samples, kind, _ in seen if samples > 0}
            why = next((why for _, _, why in seen if why is not None), None)
            if why is None and samples == 0:
                why = "no rank has used it in the first step"
            if why is not None:
                self.found[name] = ("hub", why)
                self._captures.pop(name).remove()
                continue
            layers.append(self._layer(name, max(samples, self._most.get(name, 0)), kinds))
        if not layers:
            self._print()
            return False
        # Other ranks may have used layers that rank 0 has not. These come last.
        order = [name for name in reports[0]["order"] if name in self._captures]
        self._order = order + [name for name in self._captures if name not in order]
        self.settings = {"layers": layers, "scheme": self._asked}
        return True

    def _layer(self, name: str, samples: int, kinds: set[str | None]) -> dict[str, Any]:
        """A layer in the form of the job's settings. If its factors have one half-precision type at all ranks, they are sent in
        that type, without a loss."""
        capture = self._captures[name]
        keys = [capture.weight.number, *([capture.bias.number] if capture.bias is not None else [])]
        size = {"outputs": capture.outputs, "inputs": capture.inputs, "samples": samples}
        layer: dict[str, Any] = {"name": name, "keys": keys, "type": {"fully-connected": size}}
        kind = kinds.pop() if len(kinds) == 1 else None
        if kind is not None:
            layer["factor_codec"] = kind
            capture.dtype = HALVES_BY_NAME[kind]
        return layer

    def opened(self, job: _native.Job) -> None:
        """Called when the job is open. Makes the layers that the job's plan exchanges as factors."""
        if self.is_observing and job.has_checkpoints:
            self._use_the_hub()
        if not self.settings:
            return
        is_planned = all(name in self.found for name in self._order)
        plan = {name: (scheme, why) for name, scheme, why in job.plan()}
        for exchange in self._exchanges:
            exchange.layer = None
        self._queue = SendQueue()
        by_factors = {
            name: (number, samples) for number, (name, _, _, samples, _) in enumerate(job.factor_layers())
        }
        for name in [name for name in self._order if name in by_factors]:
            number, samples = by_factors[name]
            self._queue.layers.append(FactorLayer(number, samples, self._captures[name], self._queue))
        if is_planned:
            return
        self.found |= {name: plan[name] for name in self._captures}
        self._print()
        # Later jobs, which continue from saved states, keep this choice.
        for name in self._captures.keys() - by_factors.keys():
            self._captures.pop(name).remove()
        for layer in self.settings["layers"]:
            layer["scheme"] = plan[layer["name"]][0]
        if not by_factors:
            self.settings = {}

    def _use_the_hub(self) -> None:
        """Gives every layer the scheme ``hub``, because the hubs write checkpoints."""
        conflict = _native.conflict(["factors", "checkpoint-every"])
        assert conflict is not None
        message, why = conflict
        if self._asked == "factors":
            raise MisuseError(message)
        self.is_observing = False
        self.found |= dict.fromkeys(self._captures, ("hub", why))
        for capture in self._captures.values():
            capture.remove()
        self._captures = {}
        self._print()

    def flush(self) -> None:
        """Called when the hooks of the step have sent all gradients. Sends the remaining layers."""
        self._queue.flush()

    def complete(self, used: Sequence[bool]) -> None:
        """Completes an interrupted step; ``used`` says by parameter whether any rank has used it."""
        self._queue.complete(used)

    def finish_step(self) -> None:
        self._queue.finish_step()

    def forget(self) -> None:
        """Drops captured factors, because gradients were zeroed in place."""
        for capture in self._captures.values():
            capture.forget()

    def remove(self) -> None:
        """Removes the hooks from the model. A second call does nothing."""
        for capture in self._captures.values():
            capture.remove()
        for exchange in self._exchanges:
            exchange.layer = None
        self._captures = {}

    def _print(self) -> None:
        if self._world.rank != 0:
            return
        lines: dict[tuple[str, str], list[str]] = {}
        for name, found in self.found.items():
            lines.setdefault(found, []).append(name)
        for (scheme, why), names in sorted(lines.items()):
            more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
            goes = "layer" if len(names) == 1 else "layers"
            go = "goes" if len(names) == 1 else "go"
            log(f"{goes} {', '.join(names[:NAMED_MAX])}{more} {go} by {scheme}: {why}")


class Linears:
    """The Linears of a model whose weights are exchanged: those that may be exchanged as factors (``taken``), and those that may
    not, with the reason (``refused``)."""

    def __init__(self, model: torch.nn.Module, exchanges: Sequence[Exchange]) -> None:
        self.taken: dict[str, tuple[torch.nn.Linear, Exchange, Exchange | None]] = {}
        self.refused: dict[str, str] = {}
        of = {id(exchange.parameter): exchange for exchange in exchanges}
        users: dict[int, list[str]] = {}
        linears: dict[str, torch.nn.Linear] = {}
        for path, module in model.named_modules():
            # The model itself may be a Linear, whose path is empty.
            name = ".".join(part for part in path.split(".") if part != "_orig_mod") or type(module).__name__
            for parameter in dict.values(module._parameters):
                users.setdefault(id(parameter), []).append(name)
            if isinstance(module, torch.nn.Linear) and id(dict.get(module._parameters, "weight")) in of:
                linears[name] = module
        for name, module in linears.items():
            weight = of[id(dict.get(module._parameters, "weight"))]
            bias = of.get(id(dict.get(module._parameters, "bias")))
            why = _why_not(module, weight, bias, users, name)
            if why is None:
                self.taken[name] = module, weight, bias
            else:
                self.refused[name] = why


def _why_not(
    module: torch.nn.Linear,
    weight: Exchange,
    bias: Exchange | None,
    users: Mapping[int, Sequence[str]],
    name: str,
) -> str | None:
    """Returns the reason why a Linear cannot be exchanged as factors, or None, as far as the model's definition shows it."""
    for exchange in (weight, bias):
        others = [user for user in users[id(exchange.parameter)] if user != name] if exchange else []
        if others:
            return f"it is tied: {others[0]} has the same parameter"
    if type(module).forward is not torch.nn.Linear.forward or "forward" in module.__dict__:
        return "its forward pass is not torch.nn.Linear's"
    if not weight.memory.is_contiguous():
        return "its weight does not lie row by row in memory"
    if bias is not None and bias.dtype is not weight.dtype:
        return "its weight and its bias are of different types"
    return None


def _observed(capture: Capture) -> tuple[int, str | None, str | None]:
    """The number of samples in the first step, their half-precision type if they have one, and the reason why the layer cannot
    be exchanged as factors, if there is one."""
    weight, bias = (
        capture.weight.parameter.grad,
        capture.bias.parameter.grad if capture.bias is not None else None,
    )
    samples, is_whole = capture.samples, capture.is_whole
    kinds = capture.dtypes
    kind = HALVES.get(kinds.pop()) if len(kinds) == 1 else None
    factors = capture.take()
    if weight is not None and samples == 0:
        return (
            0,
            None,
            "its forward pass was not seen, as in compiled code, or where its weight is used directly",
        )
    if not is_whole or not factors.make(weight, bias):
        return (
            samples,
            kind,
            "its inputs and output gradients do not make its whole gradient: something else uses or changes it",
        )
    return samples, kind, None


def _most_samples(samples: int | Mapping[str, int] | None, linears: Linears) -> Mapping[str, int]:
    """The most samples of a step by layer, for the layers for which the user gives it."""
    given = dict.fromkeys(linears.taken, samples) if isinstance(samples, int) else dict(samples or {})
    if unknown := given.keys() - linears.taken.keys() - linears.refused.keys():
        raise MisuseError(f"samples names {sorted(unknown)}, which are no Linear of the model")
    if wrong := [count for count in given.values() if not isinstance(count, int) or count < 1]:
        raise MisuseError(f"samples are numbers from 1, not {wrong[0]!r}")
    return given


def why_no_factors(optimizer: str, clips: bool, rejects_non_finite: bool) -> tuple[str, str] | None:
    """Returns the reason why no layer can be exchanged as factors, as a message and as the reason alone."""
    asked = {
        "factors": True,
        "factors-in-pytorch": True,
        "two-phase": clips,
        "reject-non-finite": rejects_non_finite,
        "registered-optimizer": optimizer not in _optimizer_state.NAMES,
    }
    return _native.conflict([feature for feature, is_asked in asked.items() if is_asked])
