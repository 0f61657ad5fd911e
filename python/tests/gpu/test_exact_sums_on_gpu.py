"""Many steps with tensors of random sizes on changing streams. Gradients are small integers, so that sums are exact and each
value that a step leaves is known."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from device import DEVICE, STREAMS, begin, keep_busy
from team import Rank, Team
from torch import nn
from torch.nn.parallel import DistributedDataParallel

TENSORS = 12
STEPS = {torch.float32: 300, torch.bfloat16: 120, torch.float16: 120}
"""A bf16 holds all integers to 256, and no step changes a value by more than 2."""


class Given(nn.Module):
    """A model whose gradients are the tensors that it is called with."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        sizes = torch.randint(1, 3000, (TENSORS,), generator=torch.Generator().manual_seed(11))
        # One is larger than a chunk of the hub, and one has no dimension.
        shapes = [torch.Size([int(size)]) for size in sizes] + [torch.Size([300, 301]), torch.Size([])]
        self.tensors = nn.ParameterList(torch.zeros(shape, dtype=dtype, device=DEVICE) for shape in shapes)

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        pairs = zip(self.tensors, gradients, strict=True)
        return torch.stack([(tensor * gradient).sum() for tensor, gradient in pairs]).sum()


def gradients_of(model: Given, step: int, rank: int) -> list[torch.Tensor]:
    """A rank's gradients in a step, on the host: -2, 0 and 2, whose mean of two ranks is an integer."""
    source = torch.Generator().manual_seed(1000 * step + rank)
    return [
        2 * torch.randint(-1, 2, tensor.shape, generator=source).to(tensor.dtype) for tensor in model.tensors
    ]


def through_hub_optimizer(model: Given) -> tuple[nn.Module, torch.optim.Optimizer]:
    import paramhub.torch

    return model, paramhub.torch.HubOptimizer(model, paramhub.SGD(lr=1.0))


def through_the_hook(model: Given) -> tuple[nn.Module, torch.optim.Optimizer]:
    import paramhub.torch

    ddp = DistributedDataParallel(model, bucket_cap_mb=0.01)
    ddp.register_comm_hook(paramhub.torch.HubState(), paramhub.torch.hub_hook)
    return ddp, torch.optim.SGD(model.parameters(), lr=1.0)


def through_distributed_optimizer(model: Given) -> tuple[nn.Module, torch.optim.Optimizer]:
    import paramhub.torch

    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return model, paramhub.torch.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


Way = Callable[[Given], tuple[nn.Module, torch.optim.Optimizer]]


def steps(rank: Rank, way: Way, dtype: torch.dtype) -> int:
    """Returns the number of values that were compared."""
    import paramhub.torch

    begin()
    dist.init_process_group("gloo")
    model = Given(dtype)
    called, optimizer = way(model)
    side = STREAMS.Stream()
    own = STREAMS.current_stream()
    expected = [torch.zeros(tensor.shape, dtype=dtype) for tensor in model.tensors]
    seen: list[list[torch.Tensor]] = []
    wanted: list[list[torch.Tensor]] = []
    for step in range(STEPS[dtype]):
        stream = side if step % 3 == 2 else own
        side.wait_stream(own)
        with STREAMS.stream(stream):
            optimizer.zero_grad()
            mine = [gradient.to(DEVICE) for gradient in gradients_of(model, step, rank.rank)]
            if step % 40 in (1, 2):
                # The gradients do not exist for a long time after backward has submitted them.
                keep_busy()
            called(mine).backward()
            optimizer.step()
            if isinstance(optimizer, paramhub.torch.HubOptimizer):
                optimizer.synchronize()
            # These copies are submitted while the results may still be on their way.
            seen.append([tensor.detach().clone() for tensor in model.tensors])
        if DEVICE.type != "cpu":
            own.wait_stream(side)
        of_all = zip(*(gradients_of(model, step, other) for other in range(rank.size)), strict=True)
        expected = [before - sum(each) / rank.size for before, each in zip(expected, of_all, strict=True)]
        wanted.append(expected)
    STREAMS.synchronize()
    for step, (found, right) in enumerate(zip(seen, wanted, strict=True)):
        for number, (tensor, other) in enumerate(zip(found, right, strict=True)):
            assert torch.equal(tensor.cpu(), other), f"step {step}, tensor {number}"
    return sum(map(len, seen))


@pytest.mark.parametrize("dtype", list(STEPS), ids=str)
@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("way", [through_hub_optimizer, through_the_hook, through_distributed_optimizer])
def test_every_value_of_every_step_is_exact(team: Team, way: Way, transport: str, dtype: torch.dtype) -> None:
    compared = STEPS[dtype] * (TENSORS + 2)
    assert team(steps, way, dtype, ranks=2, env={"PARAMHUB_TRANSPORT": transport}) == [compared] * 2
