"""Awaiting what must be known to have happened or not, whatever becomes of who awaits it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def see_through(work: Coroutine[Any, Any, T]) -> T:
    """Await work to its end, also when this task is cancelled meanwhile: the cancel counts then."""
    task = asyncio.ensure_future(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        if not task.cancelled():
            task.exception()  # seen: nobody is left to be told
        raise asyncio.CancelledError
    return task.result()
