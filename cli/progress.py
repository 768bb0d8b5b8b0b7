"""What goes on meanwhile, on stderr: a bar on a terminal, a line a stage elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self

from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

from modeld.cli.output import one_line, seconds, stderr_console
from modeld.client import Chunk, ImportProgress, LoadProgress, QueueStatus

STAGES = {
    "starting_worker": "starting the engine",
    "verifying": "verifying the file",
    "converting": "converting the model for OpenVINO",
    "loading": "loading the model",
    "opening": "opening a session",
    "check": "checking the file",
    "hash": "reading the file",
    "copy": "copying the file",
}


class Meanwhile:
    """Shows one activity at a time; a context manager. ``quiet``: nothing but on a terminal."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._tty = sys.stderr.isatty()
        self._quiet = quiet
        self._said = ""
        self._place: tuple[int, str] | None = None
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def show(self, text: str, fraction: float | None = None) -> None:
        """``fraction`` from 0 to 1; None: it isn't known how long this takes."""
        text = one_line(text)
        if not self._tty:
            if text != self._said and not self._quiet:
                print(f"{text} ...", file=sys.stderr, flush=True)
            self._said = text
            return
        if self._progress is None or self._task is None:
            self._progress = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(),
                TaskProgressColumn(),
                TimeElapsedColumn(),
                console=stderr_console(),
                transient=True,
            )
            self._task = self._progress.add_task(text, total=None)
            self._progress.start()
        self._progress.update(
            self._task,
            description=text,
            total=None if fraction is None else 1.0,
            completed=0.0 if fraction is None else fraction,
        )

    def event(self, event: object) -> None:
        """Show an event of a call; a chunk of an answer ends the show."""
        if isinstance(event, QueueStatus):
            self._queue(event)
        elif isinstance(event, LoadProgress):
            self.show(STAGES.get(event.stage, event.stage), event.fraction)
        elif isinstance(event, ImportProgress):
            self.bytes(event.stage, event.done_bytes, event.total_bytes)
        elif isinstance(event, Chunk):
            self.stop()

    def _queue(self, event: QueueStatus) -> None:
        """A line only when the place or the holder changes; on a terminal also the time."""
        place = (event.position, event.holder_operation)
        if place == self._place and not self._tty:
            return
        self._place = place
        text = f"waiting, position {event.position}"
        if event.holder_operation:
            text += f"; now running: {event.holder_operation}"
            text += f" ({seconds(event.holder_age_seconds)})" if self._tty else ""
        self.show(text)

    def bytes(self, stage: str, done: int, total: int) -> None:
        self.show(STAGES.get(stage, stage), done / total if total else None)

    def stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress, self._task = None, None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.stop()
