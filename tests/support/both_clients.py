"""The synchronous and the asyncio client by one text: what may have to be awaited."""

from __future__ import annotations

import inspect
from typing import Any


async def done(value: Any) -> Any:
    """What a call of either client came to."""
    return await value if inspect.isawaitable(value) else value
