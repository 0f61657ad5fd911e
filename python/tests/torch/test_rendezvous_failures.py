"""A rank that cannot join reports its failure, so that the other ranks do not wait for it."""

from __future__ import annotations

import os

import pytest
import torch
from team import Rank, Team

import paramhub
import paramhub.torch
from paramhub.torch import HubOptimizer


def lacks_the_token(rank: Rank) -> None:
    """Rank 1 arrives when rank 0, whose process has the store, has already failed."""
    model = torch.nn.Linear(4, 3)
    if rank.rank == 1:
        rank.await_mark("failed")
    with pytest.raises(paramhub.ConnectError, match="admin token") as failure:
        HubOptimizer(model, paramhub.SGD(lr=0.1))
    if rank.rank == 0:
        rank.mark("failed")
    else:
        assert "rank 0 could not create the job" in str(failure.value)


def test_ranks_learn_at_once_that_rank_0_has_no_token(team: Team) -> None:
    with paramhub.Hub(manager="127.0.0.1:0", admin_token="a-token-that-no-rank-has") as hub:
        team(lacks_the_token, ranks=2, env={"PARAMHUB_URL": hub.url})


def cannot_join(rank: Rank) -> None:
    if rank.rank == 0:
        os.environ["PARAMHUB_JOB_HUBS"] = "many"
        with pytest.raises(paramhub.MisuseError, match="PARAMHUB_JOB_HUBS is 'many'"):
            paramhub.torch.init()
    else:
        with pytest.raises(
            paramhub.ConnectError, match=r"rank \d: rank 0 has failed: PARAMHUB_JOB_HUBS is 'many'"
        ):
            paramhub.torch.init()


def test_ranks_learn_at_once_that_rank_0_cannot_join(team: Team, hub: paramhub.Hub) -> None:
    team(cannot_join, ranks=3, env={"PARAMHUB_URL": hub.url})
