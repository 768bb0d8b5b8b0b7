"""A machine from a file, so that plans can be made for hardware that isn't here:

    {"host": {"total": "16GiB", "available": "12GiB", "limit": 0},
     "devices": [{"id": "gpu0", "name": "RTX 3060", "kind": "nvidia", "engine_name": "CUDA0",
                  "total": "6GiB", "free": "5.5GiB"}]}

Sizes are bytes, or text with a unit (KiB, MB, ...). A host without "available" and a device without
"free" are unknown. Devices may also have: known, pci, shared_memory, parent, note, processes
([{"pid": 1, "bytes": "1GiB", "name": "python"}]); the host: known, swap_total, swap_free.

Owns the format. It is strict: what isn't understood is refused, never skipped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from modeld.shared.capacity import (
    DeviceKind,
    DeviceReading,
    DeviceUse,
    MachineReading,
    MemorySnapshot,
)
from modeld.shared.errors import InvalidRequest
from modeld.supervisor.durable import write_atomic
from modeld.supervisor.probes import pci_id
from modeld.supervisor.settings import parse_size, size_text

MAX_FILE_BYTES = 1 << 20
MAX_SIZE_BYTES = 1 << 60
SIZE = "bytes as a whole number, or text such as '16GiB', from 0 to 1EiB"

_Size = int | str


class _Strict(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    pass


class _Host(_Strict):
    total: _Size = 0
    available: _Size | None = None
    limit: _Size = 0
    known: bool | None = None
    swap_total: _Size = 0
    swap_free: _Size = 0


class _Use(_Strict):
    pid: int
    bytes: _Size = 0
    name: str = ""


class _Device(_Strict):
    id: str
    name: str
    kind: DeviceKind
    total: _Size = 0
    free: _Size | None = None
    known: bool | None = None
    engine_name: str = ""
    pci: str = ""
    shared_memory: bool = False
    parent: str = ""
    note: str = ""
    processes: list[_Use] = []


class _Machine(_Strict):
    host: _Host
    devices: list[_Device] = []
    notes: list[str] = []


def read_machine_file(path: Path) -> MachineReading:
    """The machine that the file describes; its ``source`` is the file's path.

    Raises InvalidRequest, which names the file, the field, its value and what is allowed.
    """
    return parse_machine(_bytes_of(path), str(path))


def machine_text(path: Path) -> str:
    """The text of a machine file, for whoever reads it elsewhere; what it says isn't looked at.

    Raises InvalidRequest for a file that can't be read, is too large, or isn't UTF-8.
    """
    return _utf8(_bytes_of(path), str(path))


def parse_machine(text: str | bytes, source: str) -> MachineReading:
    """The machine that a file's text describes. ``source`` says where it is from, in refusals too.

    Raises InvalidRequest, as reading a file does.
    """
    raw = _decoded(text, source)
    _only_known_fields(source, raw)
    try:
        machine = msgspec.convert(raw, _Machine, strict=True)
    except msgspec.ValidationError as error:
        raise _misfit(source, raw, str(error)) from None
    return _Checks(source).reading(machine)


def write_machine_file(path: Path, reading: MachineReading) -> None:
    """Write a reading so that ``read_machine_file`` gives the same one, but for its source.

    Raises InvalidRequest for a reading that no file may hold, before anything is written; and
    StorageFull or OSError, after which the old file still stands.
    """
    machine = _Machine(
        host=_host_of(reading.host),
        devices=[_device_of(device) for device in reading.devices],
        notes=list(reading.notes),
    )
    _Checks(str(path)).reading(machine)
    data = msgspec.json.format(msgspec.json.encode(machine), indent=2) + b"\n"
    if len(data) > MAX_FILE_BYTES:
        raise _too_large(str(path), len(data))
    write_atomic(path, data)


# --- the text ------------------------------------------------------------------------------------


def _refused(source: str, field: str, value: object, allowed: str, detail: str = "") -> Exception:
    shown = f"{value!r:.200}" if not isinstance(value, str) else value[:200]
    error = InvalidRequest.of(field, shown, allowed, detail)
    return InvalidRequest(
        f"{source} describes no machine: {error.message}",
        metadata={**error.metadata, "source": source},
    )


def _too_large(source: str, size: int) -> Exception:
    return _refused(source, "size", size, f"at most {MAX_FILE_BYTES} bytes")


def _bytes_of(path: Path) -> bytes:
    source = str(path)
    try:
        if not path.is_file():
            what = "no regular file" if path.exists() else "no such file"
            raise _refused(source, "file", source, "a JSON file", f"There is {what}.")
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise _too_large(source, path.stat().st_size)
    except OSError as error:
        words = error.strerror or str(error)
        raise _refused(source, "file", source, "a readable file", f"{words}.") from None
    return data


def _utf8(data: bytes, source: str) -> str:
    """Raises InvalidRequest. A byte order mark is no part of the text."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        head = f"{data[:60]!r}"
        raise _refused(source, "text", head, "text in UTF-8", f"Not read: {error}.") from None


def _decoded(text: str | bytes, source: str) -> Any:
    """The JSON. Raises InvalidRequest."""
    if isinstance(text, bytes):
        text = _utf8(text, source)
    try:
        data = text.encode()
        if len(data) > MAX_FILE_BYTES:
            raise _too_large(source, len(data))
        raw = json.loads(data, object_pairs_hook=_fields, parse_constant=_no_constant)
        json.dumps(raw, ensure_ascii=False).encode()  # half characters can't go anywhere from here
    except (ValueError, RecursionError) as error:
        why = str(error) if isinstance(error, ValueError) else "it is nested too deeply"
        head = f"{text[:60]!r}"
        raise _refused(source, "text", head, "a JSON object", f"Not read: {why[:200]}.") from None
    return raw


def _fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"an object has the field {twice[:80]!r} twice")
    return found


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON value")


def _only_known_fields(source: str, raw: Any) -> None:
    """Raises InvalidRequest for a field that the format doesn't have, by any name."""
    for place, value in _objects(raw):
        holder = re.sub(r"\[\d+\]$", "", place).rpartition(".")[2]
        fields = _FIELDS[holder or "machine"]
        for name in value:
            if name not in fields:
                full = f"{place}.{name}" if place else name
                allowed = f"only these fields: {', '.join(fields)}"
                raise _refused(source, full[:200], value[name], allowed)


def _objects(raw: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each object that the format has, with its place; what isn't one is left to be refused."""
    if not isinstance(raw, dict):
        return
    yield "", raw
    if isinstance(host := raw.get("host"), dict):
        yield "host", host
    for at, device in _listed(raw, "devices"):
        yield at, device
        for use_at, use in _listed(device, "processes"):
            yield f"{at}.{use_at}", use


def _listed(holder: dict[str, Any], name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    found = holder.get(name)
    for index, value in enumerate(found if isinstance(found, list) else ()):
        if isinstance(value, dict):
            yield f"{name}[{index}]", value


_MISSING_FIELD = re.compile(r"Object missing required field `(\w+)`")


def _misfit(source: str, raw: Any, words: str) -> Exception:
    """msgspec's words as field, value and what is allowed. Every field is a known one by now, so
    that the place has none but known names; the rest may quote a value.
    """
    what, at, place = words.rpartition(" - at `$")
    if at:
        place = place.removesuffix("`").removeprefix(".")
    else:
        what, place = words, ""
    value = raw
    for name, index in re.findall(r"([A-Za-z_]\w*)|\[(\d+)\]", place):
        value = value[int(index)] if index else value[name]
    if field := _MISSING_FIELD.match(what):
        full = f"{place}.{field[1]}" if place else field[1]
        return _refused(source, full[:200], "", "a value: this field must be there")
    if what.startswith("Invalid enum value"):
        allowed = ", ".join(repr(kind.value) for kind in DeviceKind)
    else:
        allowed = SIZE if "`int | str" in what else what.removeprefix("Expected ")
    return _refused(source, place or "machine", value, allowed)


_FIELDS: dict[str, tuple[str, ...]] = {
    "machine": _Machine.__struct_fields__,
    "host": _Host.__struct_fields__,
    "devices": _Device.__struct_fields__,
    "processes": _Use.__struct_fields__,
}


# --- what it means -------------------------------------------------------------------------------


class _Checks:
    """Turns what was decoded into a reading. Raises InvalidRequest for what is from ``source``."""

    def __init__(self, source: str) -> None:
        self._source = source

    def reading(self, machine: _Machine) -> MachineReading:
        devices = tuple(
            self._device(device, f"devices[{index}]")
            for index, device in enumerate(machine.devices)
        )
        self._unlike(devices)
        return MachineReading(
            host=self._host(machine.host),
            devices=devices,
            source=self._source,
            notes=tuple(machine.notes),
        )

    def _size(self, value: _Size, field: str) -> int:
        size = value
        if isinstance(value, str):  # a bound on digits: Python refuses to read thousands of them
            parsed = parse_size(value) if len(value) <= 40 else None
            size = -1 if parsed is None else parsed
        if not isinstance(size, int) or not 0 <= size <= MAX_SIZE_BYTES:
            raise _refused(self._source, field, value, SIZE)
        return size

    def _part(self, value: _Size, whole: int, field: str, whole_name: str) -> int:
        size = self._size(value, field)
        if size > whole:
            allowed = f"at most {whole_name}, which is {size_text(whole)}"
            raise _refused(self._source, field, value, allowed)
        return size

    def _known(self, known: bool | None, told: object, total: int, where: str, name: str) -> bool:
        if known is False or (known is None and told is None):
            return False
        if told is None:
            allowed = f"false, or true with {where}.{name}"
            raise _refused(self._source, f"{where}.known", known, allowed)
        if not total:
            raise _refused(
                self._source, f"{where}.total", total, f"more than 0 where {name} is told"
            )
        return True

    def _host(self, host: _Host) -> MemorySnapshot:
        total = self._size(host.total, "host.total")
        known = self._known(host.known, host.available, total, "host", "available")
        limit = self._size(host.limit, "host.limit")
        available = self._part(host.available or 0, total, "host.available", "host.total")
        if limit:
            self._part(available, limit, "host.available", "host.limit")
        swap_total = self._size(host.swap_total, "host.swap_total")
        return MemorySnapshot(
            total_bytes=total,
            available_bytes=available,
            limit_bytes=limit,
            known=known,
            swap_total_bytes=swap_total,
            swap_free_bytes=self._part(
                host.swap_free, swap_total, "host.swap_free", "host.swap_total"
            ),
        )

    def _device(self, device: _Device, where: str) -> DeviceReading:
        for field in ("id", "name"):
            if not getattr(device, field).strip():
                raise _refused(self._source, f"{where}.{field}", "", "text")
        if device.pci and pci_id(device.pci) != device.pci:
            allowed = "a bus id in lower case, such as '0000:01:00.0'"
            raise _refused(self._source, f"{where}.pci", device.pci, allowed)
        total = self._size(device.total, f"{where}.total")
        known = self._known(device.known, device.free, total, where, "free")
        uses = []
        for index, use in enumerate(device.processes):
            field = f"{where}.processes[{index}]"
            if not 0 < use.pid < 1 << 32:
                raise _refused(self._source, f"{field}.pid", use.pid, "a process id, from 1")
            uses.append(DeviceUse(use.pid, self._size(use.bytes, f"{field}.bytes"), use.name))
        return DeviceReading(
            id=device.id,
            name=device.name,
            kind=device.kind,
            total_bytes=total,
            free_bytes=self._part(device.free or 0, total, f"{where}.free", f"{where}.total"),
            known=known,
            engine_name=device.engine_name,
            pci=device.pci,
            shared_memory=device.shared_memory,
            parent=device.parent,
            note=device.note,
            processes=tuple(uses),
        )

    def _unlike(self, devices: tuple[DeviceReading, ...]) -> None:
        ids: dict[str, int] = {}
        engine_names: dict[str, int] = {}
        for index, device in enumerate(devices):
            for field, value, seen in (
                ("id", device.id, ids),
                ("engine_name", device.engine_name, engine_names),
            ):
                if value and value in seen:
                    where = f"devices[{index}].{field}"
                    allowed = f"one that differs from devices[{seen[value]}].{field}"
                    raise _refused(self._source, where, value, allowed)
                seen[value] = index
        for index, device in enumerate(devices):
            if device.parent and (device.parent not in ids or device.parent == device.id):
                allowed = "another device's id"
                raise _refused(self._source, f"devices[{index}].parent", device.parent, allowed)


def _host_of(host: MemorySnapshot) -> _Host:
    told = host.known or host.available_bytes > 0
    return _Host(
        total=_text(host.total_bytes),
        available=_text(host.available_bytes) if told else None,
        limit=_text(host.limit_bytes),
        known=False if told and not host.known else None,
        swap_total=_text(host.swap_total_bytes),
        swap_free=_text(host.swap_free_bytes),
    )


def _device_of(device: DeviceReading) -> _Device:
    told = device.known or device.free_bytes > 0
    return _Device(
        id=device.id,
        name=device.name,
        kind=device.kind,
        total=_text(device.total_bytes),
        free=_text(device.free_bytes) if told else None,
        known=False if told and not device.known else None,
        engine_name=device.engine_name,
        pci=device.pci,
        shared_memory=device.shared_memory,
        parent=device.parent,
        note=device.note,
        processes=[_Use(use.pid, _text(use.bytes), use.name) for use in device.processes],
    )


def _text(size: int) -> _Size:
    """Text with a unit where that is shorter; a number keeps a value that no file may hold."""
    return size_text(size) if size > 0 and size % 1024 == 0 else size
