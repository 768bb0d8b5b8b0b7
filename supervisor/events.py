"""Broadcast of state changes to watchers; a slow watcher loses the oldest events and is told."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from dataclasses import dataclass

WATCHER_BACKLOG = 1024


@dataclass(frozen=True)
class Event:
    sequence: int
    unix_ms: int
    kind: str
    backend: str = ""
    state: str = ""
    model: str = ""
    generation: int = 0
    session_id: str = ""
    cause: str = ""


class Watcher:
    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=WATCHER_BACKLOG)
        self._ready = asyncio.Event()

    def put(self, event: Event) -> None:
        self._events.append(event)
        self._ready.set()

    async def next(self) -> Event:
        """The next event; ``sequence`` shows a gap where this watcher was too slow."""
        while not self._events:
            self._ready.clear()
            await self._ready.wait()
        return self._events.popleft()


class EventBus:
    def __init__(self) -> None:
        self._sequence = itertools.count(1)
        self._watchers: set[Watcher] = set()

    def emit(
        self,
        kind: str,
        *,
        backend: str = "",
        state: str = "",
        model: str = "",
        generation: int = 0,
        session_id: str = "",
        cause: str = "",
    ) -> Event:
        event = Event(
            next(self._sequence),
            int(time.time() * 1000),
            kind,
            backend,
            state,
            model,
            generation,
            session_id,
            cause,
        )
        for watcher in self._watchers:
            watcher.put(event)
        return event

    def watch(self) -> Watcher:
        watcher = Watcher()
        self._watchers.add(watcher)
        return watcher

    def unwatch(self, watcher: Watcher) -> None:
        self._watchers.discard(watcher)
