from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paramhub._native import Handle


async def ended(handle: Handle) -> None:
    """Waits in an event loop for a handle's end, and raises the handle's error if it failed."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()

    def resolve() -> None:
        if not future.done():
            future.set_result(None)

    def on_end(_: Handle) -> None:
        # The loop may have been closed meanwhile. Then no coroutine waits.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(resolve)

    handle.add_done_callback(on_end)
    await future
    handle.wait()
