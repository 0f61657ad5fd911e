"""torch's DataLoader forks processes beside a job, as in most training programs."""

from __future__ import annotations

import os

import pytest
import torch
from team import Rank, Team
from torch.utils.data import DataLoader, Dataset
from workers import TIMEOUT, new_job

import paramhub


class Numbers(Dataset):
    """Numbers with the id of the process that has read them."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((100,), float(index)), os.getpid()


def trains(rank: Rank, ticket: paramhub.JobTicket, context: str) -> tuple[float, int]:
    weight = torch.zeros(100)
    readers: set[int] = set()
    with paramhub.connect(*ticket, rank.rank) as job:
        job.init({"w": weight}, optimizer=paramhub.SGD(lr=1.0))
        for _ in range(2):
            handle = None
            # The loader's processes are forked during one exchange, and end during another.
            for batch, reader in DataLoader(
                Numbers(), batch_size=8, num_workers=2, multiprocessing_context=context
            ):
                if handle is not None:
                    handle.wait(TIMEOUT)
                readers.update(reader.tolist())
                handle = job.push_pull("w", batch.mean(0), out=weight)
        handle.wait(TIMEOUT)
    assert os.getpid() not in readers
    return float(weight[0]), len(readers)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_loading_beside_a_job(hub: paramhub.Hub, team: Team, transport: str) -> None:
    results = team(trains, new_job(hub, 2), "fork", ranks=2, env={"PARAMHUB_TRANSPORT": transport})
    # Twice the sum over eight batches of the means of 0..7, 8..15, and so on.
    assert results == [(-2.0 * sum(3.5 + 8 * batch for batch in range(8)), 4)] * 2
