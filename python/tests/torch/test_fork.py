"""A rank that forks after `init` goes on, and its child's end is the child's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from launching import TORCHRUN, Ended

# The child ends as Python programs do, and so calls the functions registered at ``atexit``.
PROGRAM = """
import os, sys
import torch
import paramhub.torch as hvd

hvd.init()
assert hvd.allreduce(torch.ones(3), op=hvd.Sum)[0] == hvd.size()
child = os.fork()
if child == 0:
    try:
        hvd.allreduce(torch.ones(3))
    except Exception as error:
        print(f"child of rank {os.environ['RANK']}: {type(error).__name__}: {error}", flush=True)
    sys.exit(7)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 7
assert hvd.allreduce(torch.full((100_000,), 2.0))[0] == 2
print(f"rank {hvd.rank()} goes on")
"""


def test_a_child_of_a_rank_is_refused_and_ends_alone(launch: Callable[..., Ended], tmp_path: Path) -> None:
    script = tmp_path / "forks.py"
    script.write_text(PROGRAM)
    code, output = launch(*TORCHRUN, "--nproc-per-node=2", script)
    assert code == 0, output
    for rank in range(2):
        assert f"rank {rank} goes on" in output
        assert f"child of rank {rank}: MisuseError: this process was forked after paramhub" in output
