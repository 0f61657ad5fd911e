"""Opens key-value stores on a team's ranks."""

from __future__ import annotations

from typing import Any

from team import Rank

import paramhub
import paramhub.kvstore as kvs

COLLECTIVE = ("funnel", "concom", "depcha")
KINDS = ("hub", *COLLECTIVE)


def open_store(rank: Rank, ticket: paramhub.JobTicket, kind: str, **options: Any) -> kvs.KVStore:
    return kvs.create(
        kind, url=ticket.url, job=ticket.job, secret=ticket.secret, rank=rank.rank, timeout=60, **options
    )
