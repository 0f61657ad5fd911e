"""Exchanges in pieces. The device is the CPU, whose streams do nothing; python/tests/gpu has the order of real copies."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from paramhub.errors import MisuseError
from paramhub.torch._device_streams import DeviceStreams
from paramhub.torch._staged_exchanges import Piece, StagedExchanges
from paramhub.torch._staged_handle import StagedHandle
from paramhub.torch._work import Work

TIMEOUT = 30.0


def streams() -> DeviceStreams:
    return DeviceStreams(torch.device("cpu"))


class Pieces:
    """Pieces of two elements of a tensor, which count up from 0. Each request adds 10 to them on the host and ends at once."""

    def __init__(self, count: int, requested: Callable[[int], None] = lambda number: None) -> None:
        self.result = torch.zeros(2 * count)
        source = torch.arange(2.0 * count)
        host = torch.zeros(2 * count)
        self.pieces = []
        for number in range(count):
            part = slice(2 * number, 2 * number + 2)

            def request(number: int = number, part: slice = part) -> Work:
                requested(number)
                host[part] += 10
                return Work(())

            back = ([self.result[part]], [host[part]])
            self.pieces.append(Piece(([host[part]], [source[part]]), request, back))


def await_set(event: threading.Event) -> None:
    assert event.wait(TIMEOUT)


def begin(
    exchanges: StagedExchanges,
    pieces: Pieces,
    own: DeviceStreams | None = None,
    finish: Callable[[], None] | None = None,
) -> StagedHandle:
    handle = StagedHandle(own or streams())
    exchanges.begin(handle, handle.streams.current_stream(), pieces.pieces, finish)
    return handle


def test_a_piece_is_exchanged_while_the_next_is_copied() -> None:
    """The copy of each piece ends only when the result of the piece before it is there."""
    own = streams()
    pieces = Pieces(3)
    made = 0

    class CopiedEvent(torch.cpu.Event):
        def __init__(self) -> None:
            nonlocal made
            super().__init__()
            # The first event is that of the values.
            self.piece = made - 1
            made += 1

        def synchronize(self) -> None:
            before = 2 * self.piece - 1
            if self.piece > 0:
                assert pieces.result[before] == 10.0 + before, (
                    f"piece {self.piece - 1} waits for piece {self.piece}"
                )

    own._module = SimpleNamespace(**{**vars(own._module), "Event": CopiedEvent})
    begin(StagedExchanges(), pieces, own).wait(TIMEOUT)
    assert pieces.result.tolist() == [10.0, 11.0, 12.0, 13.0, 14.0, 15.0]


def test_requests_are_submitted_in_the_order_of_the_exchanges() -> None:
    exchanges, may_go_on = StagedExchanges(), threading.Event()
    order: list[str] = []

    def first(number: int) -> None:
        await_set(may_go_on)
        order.append(f"first {number}")

    handles = [
        begin(exchanges, Pieces(2, first)),
        begin(exchanges, Pieces(2, lambda number: order.append(f"second {number}"))),
    ]
    waiter = threading.Thread(target=lambda: (exchanges.await_submissions(), order.append("waited")))
    waiter.start()
    assert order == [] and not any(handle.done() for handle in handles)
    may_go_on.set()
    waiter.join(TIMEOUT)
    assert order == ["first 0", "first 1", "second 0", "second 1", "waited"]
    for handle in handles:
        handle.wait(TIMEOUT)


def test_results_are_finished_once_after_the_last_piece() -> None:
    pieces = Pieces(3)
    seen: list[list[float]] = []
    begin(StagedExchanges(), pieces, finish=lambda: seen.append(pieces.result.tolist())).wait(TIMEOUT)
    assert seen == [[10.0, 11.0, 12.0, 13.0, 14.0, 15.0]]


def test_a_piece_that_is_refused_ends_the_exchange_and_later_ones_go_on() -> None:
    exchanges = StagedExchanges()
    requested: list[int] = []

    def refuse(number: int) -> None:
        requested.append(number)
        if number == 1:
            raise ValueError("refused")

    finished: list[bool] = []
    pieces = Pieces(3, refuse)
    failed = begin(exchanges, pieces, finish=lambda: finished.append(True))
    with pytest.raises(ValueError, match="refused"):
        failed.wait(TIMEOUT)
    assert failed.has_failed() and requested == [0, 1] and not finished
    later = Pieces(1)
    begin(exchanges, later).wait(TIMEOUT)
    assert later.result.tolist() == [10.0, 11.0]


def test_a_result_that_cannot_be_finished_is_the_exchanges_error() -> None:
    def fail() -> None:
        raise RuntimeError("no memory is left")

    with pytest.raises(RuntimeError, match="no memory is left"):
        begin(StagedExchanges(), Pieces(2), finish=fail).wait(TIMEOUT)


def test_a_failed_handle_stays_failed_and_gets_no_results() -> None:
    exchanges, may_go_on = StagedExchanges(), threading.Event()
    pieces = Pieces(2, lambda number: await_set(may_go_on))
    handle = begin(exchanges, pieces)
    handle.fail("rank 1 has died", 1)
    may_go_on.set()
    exchanges.await_submissions()
    failure = handle.exception()
    assert str(failure) == "rank 1 has died" and failure.culprit == 1
    assert pieces.result.tolist() == [0.0] * 4


def test_nothing_begins_after_the_end() -> None:
    exchanges = StagedExchanges()
    begin(exchanges, Pieces(1)).wait(TIMEOUT)
    exchanges.close()
    exchanges.join_thread(TIMEOUT)
    assert exchanges._thread is not None and not exchanges._thread.is_alive()
    with pytest.raises(MisuseError, match="was closed before this tensor was sent"):
        begin(exchanges, Pieces(1)).wait(TIMEOUT)


def test_a_device_without_streams_is_refused() -> None:
    with pytest.raises(MisuseError, match=r"a tensor on meta cannot be exchanged .* move it to the host"):
        DeviceStreams(torch.device("meta"))
