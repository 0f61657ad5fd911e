"""Program states, which a rank keeps at the hub."""

from __future__ import annotations

import numpy
import pytest
from workers import TIMEOUT, new_job

import paramhub
from paramhub.errors import MisuseError

STATE_BYTES = 100_000


def connect(hub: paramhub.Hub, transport: str, **options: float) -> paramhub.Job:
    job = paramhub.connect(*new_job(hub, 1, **options), 0, transport=transport, timeout=TIMEOUT)
    return job.init({"w": numpy.zeros(5, "f4")})


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_the_three_newest_states_come_back(hub: paramhub.Hub, transport: str) -> None:
    states = [bytes([step]) * (STATE_BYTES // 3 * step) for step in range(4)]
    with connect(hub, transport, program_state_bytes=STATE_BYTES) as job:
        for step, state in enumerate(states):
            job.save_program_state(step, state).wait(TIMEOUT)
        assert [job.program_state(step) for step in range(4)] == [None, *states[1:]]
        for state in (bytearray(b"any"), numpy.arange(6, dtype="f4").reshape(2, 3), b""):
            job.save_program_state(3, state).wait(TIMEOUT)
            assert job.program_state(3) == memoryview(state).tobytes()


def test_what_cannot_be_saved_is_refused(hub: paramhub.Hub) -> None:
    with connect(hub, "tcp", program_state_bytes=3) as job:
        with pytest.raises(MisuseError, match="has 4 bytes, but program_state_bytes of the job is 3"):
            job.save_program_state(1, b"four")
        with pytest.raises(TypeError):
            job.save_program_state(1, 4)
        assert job.program_state(1) is None
    with connect(hub, "tcp") as job:
        with pytest.raises(MisuseError, match="create it with program_state_bytes"):
            job.save_program_state(1, b"")
        with pytest.raises(MisuseError, match="create it with program_state_bytes"):
            job.program_state(1)
