"""SyncBatchNorm: as one process with the whole batch."""

from __future__ import annotations

import pytest
import torch
from team import Rank, Team
from torch import nn

TOLERANCE = 1e-5


def normalised(rank: Rank) -> None:
    import paramhub
    import paramhub.torch as hvd

    hvd.init()
    pair = hvd.add_process_set([0, 2])
    # Rank 1 has no sample in the second batch.
    for shape, samples, options in (
        ((5,), (2, 3, 4), {}),
        ((5, 4, 3), (3, 0, 2), {}),
        ((5, 7), (1, 2, 3), {"momentum": None, "eps": 1e-3}),
        ((5, 2), (2, 2, 2), {"affine": False}),
        ((5, 2), (2, 2, 2), {"track_running_stats": False}),
    ):
        kind = {1: nn.BatchNorm1d, 2: nn.BatchNorm1d, 3: nn.BatchNorm2d}[len(shape)]
        ours, whole = hvd.SyncBatchNorm(5, **options), kind(5, **options)
        generator = torch.Generator().manual_seed(3)
        if ours.affine:
            weight = torch.randn(5, generator=generator)
            for module in (ours, whole):
                module.weight.data.copy_(weight)
                module.bias.data.copy_(-weight)
        for step in range(3):
            # A mean far from zero, where a variance from plain sums of squares would lose its digits.
            batch = torch.randn(sum(samples), *shape, generator=generator) * 2 + 100 * step
            towards = torch.randn(batch.shape, generator=generator)
            begin = sum(samples[: rank.rank])
            mine = slice(begin, begin + samples[rank.rank])
            own, all_ = batch[mine].clone().requires_grad_(), batch.clone().requires_grad_()
            output, expected = ours(own), whole(all_)
            assert torch.allclose(output, expected[mine], atol=1e-4 if step else TOLERANCE), (shape, step)
            (output * towards[mine]).sum().backward()
            (expected * towards).sum().backward()
            assert torch.allclose(own.grad, all_.grad[mine], atol=1e-4 if step else TOLERANCE), (shape, step)
        if ours.affine:
            for name in ("weight", "bias"):
                summed = hvd.allreduce(getattr(ours, name).grad, op=hvd.Sum)
                assert torch.allclose(summed, getattr(whole, name).grad, atol=2e-4), (shape, name)
        for name, buffer in whole.named_buffers():
            assert torch.allclose(getattr(ours, name), buffer, atol=TOLERANCE * 100, rtol=TOLERANCE), name
        ours.eval(), whole.eval()
        if ours.track_running_stats:
            # No operation, so ranks may evaluate alone.
            if rank.rank == 0:
                assert torch.allclose(ours(batch), whole(batch), atol=1e-4)
        else:
            assert torch.allclose(ours(batch[mine]), whole(batch)[mine], atol=1e-4)

    double = hvd.SyncBatchNorm(2).double()
    half = hvd.SyncBatchNorm(2).bfloat16()
    assert double(torch.randn(2, 2).double()).dtype == torch.float64
    assert half(torch.randn(2, 2).bfloat16()).dtype == torch.bfloat16
    own = torch.randn(2, 2, requires_grad=True)
    (first,) = torch.autograd.grad(hvd.SyncBatchNorm(2)(own).square().sum(), own, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()
    with pytest.raises(paramhub.MisuseError, match=r"not of shape \[3\]"):
        double(torch.ones(3))
    if pair.included():
        batch = torch.arange(8.0).view(4, 2)
        output = hvd.SyncBatchNorm(2, process_set=pair)(batch[2 * pair.rank() :][:2])
        assert torch.allclose(output, nn.BatchNorm1d(2)(batch)[2 * pair.rank() :][:2], atol=TOLERANCE)


def test_it_is_as_one_process_with_the_whole_batch(team: Team) -> None:
    team(normalised, ranks=3)
