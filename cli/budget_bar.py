"""A picture of where a memory's bytes go: one bar whose parts add up, to the column.

Pure: bytes in, lines of text out. Knows nothing of models, plans or terminals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from modeld.cli.output import size

MIN_WIDTH, MAX_WIDTH = 40, 100  # columns


@dataclass(frozen=True)
class Kind:
    """How a kind of part looks. The letters tell parts apart where there are no other glyphs."""

    name: str
    letter: str
    glyph: str
    style: str


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("weights", "W", "█", "blue"),
        Kind("KV", "K", "▓", "green"),
        Kind("compute", "C", "▒", "cyan"),
        Kind("projector", "P", "▞", "magenta"),
        Kind("adapters", "A", "▚", "magenta"),
        Kind("draft", "D", "▙", "magenta"),
        Kind("more sessions", "S", "▜", "green"),
        Kind("resident", "R", "▟", "yellow"),
        Kind("promised", "p", "▛", "yellow"),
        Kind("other slots", "O", "▖", "yellow"),
        Kind("headroom", "h", "░", "white"),
        Kind("reserve", "r", "╳", "white"),
        Kind("beyond the limit", "x", "┈", "dim"),
        Kind("left free", ".", "·", "dim"),
    )
}


@dataclass(frozen=True)
class Part:
    """Bytes of one kind; ``kind`` is a key of ``KINDS``."""

    kind: str
    bytes: int


@dataclass(frozen=True)
class Picture:
    """One memory. ``over_bytes`` is what its parts are too many, 0 where they fit."""

    title: str
    parts: tuple[Part, ...]
    over_bytes: int = 0
    note: str = ""

    @property
    def total_bytes(self) -> int:
        return sum(part.bytes for part in self.parts)


@dataclass(frozen=True)
class Run:
    """Columns of one look, to be printed in ``style``."""

    text: str
    style: str = ""


Line = tuple[Run, ...]


def columns(sizes: Sequence[int], width: int) -> list[int]:
    """Whole columns for each size, ``width`` in all (none where every size is 0).

    What isn't 0 gets at least one; sizes that would get less than one are given theirs first, and
    the others share what is left by the largest remainder. A larger size never gets fewer columns.
    Raises ValueError where there are more sizes than columns, or a negative one.
    """
    if any(value < 0 for value in sizes):
        raise ValueError("a part can't have less than 0 bytes")
    shown = [index for index, value in enumerate(sizes) if value]
    if len(shown) > width:
        raise ValueError(f"{len(shown)} parts don't fit {width} columns")
    found = [0] * len(sizes)
    # Smallest first: each that is due less than a column takes one, which leaves less for others.
    shown.sort(key=lambda index: (sizes[index], index))
    left, total = width, sum(sizes)
    while shown and sizes[shown[0]] * left < total:
        smallest = shown.pop(0)
        found[smallest] = 1
        left -= 1
        total -= sizes[smallest]
    if not shown:
        return found
    rests: list[tuple[int, int, int]] = []
    for index in shown:
        found[index], rest = divmod(sizes[index] * left, total)
        rests.append((-rest, -sizes[index], index))
    spare = left - sum(found[index] for index in shown)
    for _, _, index in sorted(rests)[:spare]:
        found[index] += 1
    return found


def fits(glyphs: str, encoding: str | None) -> bool:
    """Whether a stream of that encoding can show the glyphs."""
    try:
        glyphs.encode(encoding or "ascii")
    except (LookupError, UnicodeEncodeError):
        return False
    return True


def can_draw(encoding: str | None) -> bool:
    """Whether block glyphs can be shown there; letters do where not."""
    return fits("".join(kind.glyph for kind in KINDS.values()), encoding)


def draw(picture: Picture, width: int, *, glyphs: bool) -> list[Line]:
    """The title, the bar of ``width`` columns, where memory ends if it is too short, the legend."""
    inner = min(max(width, MIN_WIDTH), MAX_WIDTH) - 2
    parts = [part for part in picture.parts if part.bytes]
    lines: list[Line] = [(Run(picture.title, "bold"),)]
    if not parts:
        return [*lines, (Run("  nothing is known of it"),)]
    shares = columns([part.bytes for part in parts], inner)
    bar = [Run(_mark(part, glyphs) * n, _kind(part).style) for part, n in zip(parts, shares)]  # noqa: B905
    lines.append((Run("["), *bar, Run("]")))
    if picture.over_bytes > 0:
        lines.append(_end_of_memory(picture, inner))
    lines += [_legend(part, picture, glyphs) for part in parts]
    if picture.over_bytes > 0:
        lines.append(_named("!", "over by", picture.over_bytes, picture, "red"))
    if picture.note:
        lines.append((Run(f"  {picture.note}", "dim"),))
    return lines


def _kind(part: Part) -> Kind:
    return KINDS[part.kind]


def _mark(part: Part, glyphs: bool) -> str:
    return _kind(part).glyph if glyphs else _kind(part).letter


def _end_of_memory(picture: Picture, inner: int) -> Line:
    """Under the bar: what memory there is, and how far the parts reach beyond it."""
    over = min(picture.over_bytes, picture.total_bytes)
    within, beyond = columns([picture.total_bytes - over, over], inner)
    return (Run(" "), Run("-" * within), Run("!" * beyond, "red"))


def _legend(part: Part, picture: Picture, glyphs: bool) -> Line:
    kind = _kind(part)
    return _named(_mark(part, glyphs), kind.name, part.bytes, picture, kind.style)


def _named(mark: str, name: str, value_bytes: int, picture: Picture, style: str) -> Line:
    percent = 100 * value_bytes / picture.total_bytes
    text = f" {name:<16} {size(value_bytes):>9} {percent:>6.1f} %"
    return (Run("  "), Run(mark, style), Run(text))
