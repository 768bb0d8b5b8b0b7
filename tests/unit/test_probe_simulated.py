"""A machine from a file: the format, its refusals, and that nothing is lost on the way."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from modeld.shared.capacity import (
    DeviceKind,
    DeviceReading,
    DeviceUse,
    MachineReading,
    MemorySnapshot,
)
from modeld.shared.errors import InvalidRequest
from modeld.supervisor.probes import simulated
from modeld.supervisor.probes.simulated import (
    parse_machine,
    read_machine_file,
    write_machine_file,
)

GIB = 1 << 30
MIB = 1 << 20

HOST = {"total": "16GiB", "available": "12GiB", "limit": 0}
CARD = {
    "id": "gpu0",
    "name": "RTX 3060",
    "kind": "nvidia",
    "total": "6GiB",
    "free": "5.5GiB",
    "engine_name": "CUDA0",
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "machine.json"


def given_file(path: Path, **fields: Any) -> Path:
    path.write_text(json.dumps({"host": HOST, "devices": [CARD], **fields}))
    return path


def test_a_machine_is_what_its_file_says(path: Path) -> None:
    assert read_machine_file(given_file(path)) == MachineReading(
        host=MemorySnapshot(total_bytes=16 * GIB, available_bytes=12 * GIB),
        devices=(
            DeviceReading(
                id="gpu0",
                name="RTX 3060",
                kind=DeviceKind.NVIDIA,
                total_bytes=6 * GIB,
                free_bytes=5 * GIB + 512 * MIB,
                engine_name="CUDA0",
            ),
        ),
        source=str(path),
    )


def test_the_example_of_the_format_can_be_read(path: Path) -> None:
    text = str(simulated.__doc__)
    path.write_text(text[text.index("{") : text.index("}]}") + 3])
    assert read_machine_file(path).devices[0].free_bytes == 5 * GIB + 512 * MIB


def test_all_that_a_reading_holds_can_be_told(path: Path) -> None:
    mig = {
        "id": "MIG-1",
        "name": "A100 MIG 1g.5gb",
        "kind": "nvidia",
        "total": 5_000_000_000,
        "free": "4GB",
        "parent": "gpu0",
        "pci": "0000:3b:00.0",
        "shared_memory": False,
        "note": "busy",
        "processes": [{"pid": 7, "bytes": "1GiB", "name": "python"}, {"pid": 8}],
    }
    host = {**HOST, "limit": "14GiB", "swap_total": "8GiB", "swap_free": "1.5 GiB"}
    reading = read_machine_file(given_file(path, host=host, devices=[CARD, mig], notes=["seen"]))
    assert reading.host.limit_bytes == 14 * GIB
    assert (reading.host.swap_total_bytes, reading.host.swap_free_bytes) == (
        8 * GIB,
        GIB + 512 * MIB,
    )
    assert reading.notes == ("seen",)
    second = reading.devices[1]
    assert (second.total_bytes, second.free_bytes) == (5_000_000_000, 4_000_000_000)
    assert second.processes == (DeviceUse(7, GIB, "python"), DeviceUse(8, 0))


def test_what_is_not_told_is_unknown_never_zero_and_known(path: Path) -> None:
    device = {key: value for key, value in CARD.items() if key != "free"}
    reading = read_machine_file(given_file(path, host={"total": "16GiB"}, devices=[device]))
    assert not reading.host.known
    assert not reading.devices[0].known
    assert reading.devices[0].total_bytes == 6 * GIB


def test_a_full_card_is_known_to_have_nothing_free(path: Path) -> None:
    (device,) = read_machine_file(given_file(path, devices=[{**CARD, "free": 0}])).devices
    assert (device.known, device.free_bytes) == (True, 0)


# --- refusals ----------------------------------------------------------------------------------


def refusal(path: Path) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        read_machine_file(path)
    assert str(path) in caught.value.message
    assert caught.value.metadata["source"] == str(path)
    return caught.value


@pytest.mark.parametrize(
    ("change", "field", "value", "allowed"),
    [
        ({"total": -1}, "devices[0].total", "-1", "0 to 1EiB"),
        ({"total": "6GiBit"}, "devices[0].total", "6GiBit", "'16GiB'"),
        ({"total": "-6GiB"}, "devices[0].total", "-6GiB", "'16GiB'"),
        ({"total": "9" * 5000}, "devices[0].total", "9" * 200, "0 to 1EiB"),
        ({"total": 1 << 61}, "devices[0].total", str(1 << 61), "0 to 1EiB"),
        ({"total": 6.5}, "devices[0].total", "6.5", "'16GiB'"),
        ({"total": True}, "devices[0].total", "True", "'16GiB'"),
        ({"total": None}, "devices[0].total", "None", "'16GiB'"),
        ({"free": "7GiB"}, "devices[0].free", "7GiB", "at most devices[0].total, which is 6GiB"),
        ({"free": []}, "devices[0].free", "[]", "'16GiB'"),
        ({"total": 0, "free": 0}, "devices[0].total", "0", "more than 0"),
        ({"kind": "amd"}, "devices[0].kind", "amd", "'nvidia', 'intel_gpu'"),
        ({"kind": 3}, "devices[0].kind", "3", "str"),
        ({"id": ""}, "devices[0].id", "", "text"),
        ({"name": " "}, "devices[0].name", "", "text"),
        ({"fre": 1}, "devices[0].fre", "1", "only these fields: id, name, kind, total, free"),
        ({"pci": "01:00.0"}, "devices[0].pci", "01:00.0", "0000:01:00.0"),
        ({"parent": "gpu9"}, "devices[0].parent", "gpu9", "another device's id"),
        ({"parent": "gpu0"}, "devices[0].parent", "gpu0", "another device's id"),
        ({"shared_memory": "no"}, "devices[0].shared_memory", "no", "bool"),
        ({"processes": [{"pid": 0}]}, "devices[0].processes[0].pid", "0", "from 1"),
        ({"processes": [{"pid": 1, "bytes": -1}]}, "devices[0].processes[0].bytes", "-1", "1EiB"),
        ({"processes": [{}]}, "devices[0].processes[0].pid", "", "must be there"),
        ({"processes": [{"x": 1}]}, "devices[0].processes[0].x", "1", "only these fields: pid"),
        ({"processes": 7}, "devices[0].processes", "7", "array"),
    ],
)
def test_a_device_that_makes_no_sense_is_refused_by_field(
    path: Path, change: dict[str, Any], field: str, value: str, allowed: str
) -> None:
    error = refusal(given_file(path, devices=[{**CARD, **change}]))
    assert error.metadata["field"] == field
    assert error.metadata["value"].strip() == value
    assert allowed in error.metadata["allowed"]
    assert allowed in error.message


@pytest.mark.parametrize(
    ("host", "field", "allowed"),
    [
        ({"available": "17GiB"}, "host.available", "at most host.total, which is 16GiB"),
        ({"limit": "8GiB"}, "host.available", "at most host.limit, which is 8GiB"),
        ({"limit": -1}, "host.limit", "0 to 1EiB"),
        ({"swap_free": 1}, "host.swap_free", "at most host.swap_total, which is 0"),
        ({"total": 0, "available": 0}, "host.total", "more than 0"),
        ({"memory": 0}, "host.memory", "only these fields: total, available"),
    ],
)
def test_a_host_that_makes_no_sense_is_refused_by_field(
    path: Path, host: dict[str, Any], field: str, allowed: str
) -> None:
    error = refusal(given_file(path, host={**HOST, **host}))
    assert error.metadata["field"] == field
    assert allowed in error.message


def test_known_without_a_number_is_refused(path: Path) -> None:
    device = {"id": "a", "name": "a", "kind": "other", "total": 1, "known": True}
    error = refusal(given_file(path, devices=[device]))
    assert error.metadata["field"] == "devices[0].known"


@pytest.mark.parametrize("field", ["id", "engine_name"])
def test_two_devices_of_one_name_are_refused(path: Path, field: str) -> None:
    other = {**CARD, "id": "gpu1", "engine_name": "CUDA1", field: CARD[field]}
    error = refusal(given_file(path, devices=[CARD, other]))
    assert error.metadata["field"] == f"devices[1].{field}"
    assert f"differs from devices[0].{field}" in error.message


def test_devices_that_no_engine_uses_may_all_have_no_engine_name(path: Path) -> None:
    others = [{**CARD, "id": name, "engine_name": ""} for name in "ab"]
    assert len(read_machine_file(given_file(path, devices=others)).devices) == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "Expecting value"),
        ("host: 16GiB", "Expecting value"),
        ('{"host": {"total": NaN}}', "NaN"),
        ('{"host": {"total": 1, "total": 2}}', "'total' twice"),
        ("[" * 100_000, "nested too deeply"),
        ('{"host": {}, "notes": ["\\ud800"]}', "surrogates"),
        ("[]", "object"),
        ("7", "object"),
        ("{}", "must be there"),
        ('{"host": {}, "gpus": []}', "only these fields: host, devices, notes"),
    ],
)
def test_a_file_that_is_no_machine_is_refused_in_words(path: Path, text: str, words: str) -> None:
    path.write_text(text)
    assert words in refusal(path).message


def test_bytes_that_are_no_text_are_refused(path: Path) -> None:
    path.write_bytes(b"\x80\x81\xff")
    assert "Not read" in refusal(path).message


def test_a_file_over_one_mib_is_refused(path: Path) -> None:
    path.write_text(json.dumps({"host": HOST, "notes": ["x" * (1 << 20)]}))
    error = refusal(path)
    assert error.metadata["field"] == "size"
    assert "at most 1048576 bytes" in error.message


def test_what_is_no_file_is_refused(path: Path, tmp_path: Path) -> None:
    assert "no such file" in refusal(path).message
    assert "no regular file" in refusal(tmp_path).message


def test_text_is_read_as_a_file_is_and_refused_by_where_it_is_from(path: Path) -> None:
    text = given_file(path).read_text()
    assert parse_machine(text, "machine") == replace(read_machine_file(path), source="machine")
    with pytest.raises(InvalidRequest, match=r"machine describes no machine: devices\[0\]\.id"):
        parse_machine(text.replace("gpu0", ""), "machine")
    with pytest.raises(InvalidRequest, match="at most 1048576 bytes"):
        parse_machine(" " * (1 << 21), "machine")
    with pytest.raises(InvalidRequest, match="surrogates"):
        parse_machine("\ud800", "machine")


# --- there and back ----------------------------------------------------------------------------

sizes = st.integers(0, 1 << 60) | st.integers(0, 1 << 24).map(lambda n: n * MIB)


@st.composite
def hosts(draw: st.DrawFn) -> MemorySnapshot:
    total = draw(sizes)
    limit = draw(st.just(0) | sizes)
    swap = draw(sizes)
    return MemorySnapshot(
        total_bytes=total,
        available_bytes=draw(st.integers(0, min(total, limit or total))),
        limit_bytes=limit,
        known=draw(st.booleans()) if total else False,
        swap_total_bytes=swap,
        swap_free_bytes=draw(st.integers(0, swap)),
    )


@st.composite
def devices(draw: st.DrawFn, index: int) -> DeviceReading:
    total = draw(sizes)
    return DeviceReading(
        id=f"{index}{draw(st.text(max_size=8))}",
        name=f"n{draw(st.text(max_size=8))}",
        kind=draw(st.sampled_from(DeviceKind)),
        total_bytes=total,
        free_bytes=draw(st.integers(0, total)),
        known=draw(st.booleans()) if total else False,
        engine_name=draw(st.sampled_from(["", f"CUDA{index}"])),
        pci=draw(st.sampled_from(["", "0000:01:00.0", "10000:e1:00.7"])),
        shared_memory=draw(st.booleans()),
        note=draw(st.text(max_size=20)),
        processes=tuple(
            draw(
                st.lists(
                    st.builds(DeviceUse, st.integers(1, (1 << 32) - 1), sizes, st.text(max_size=8)),
                    max_size=3,
                )
            )
        ),
    )


@st.composite
def machines(draw: st.DrawFn) -> MachineReading:
    found = [draw(devices(index)) for index in range(draw(st.integers(0, 3)))]
    if len(found) > 1 and draw(st.booleans()):
        found[1] = replace(found[1], parent=found[0].id)
    return MachineReading(
        host=draw(hosts()),
        devices=tuple(found),
        notes=tuple(draw(st.lists(st.text(max_size=20), max_size=3))),
    )


@given(reading=machines())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_reading_survives_the_file_exactly(path: Path, reading: MachineReading) -> None:
    write_machine_file(path, reading)
    assert read_machine_file(path) == replace(reading, source=str(path))


def test_a_reading_that_no_file_may_hold_is_refused_and_the_file_is_kept(path: Path) -> None:
    before = given_file(path).read_bytes()
    device = DeviceReading("a", "a", DeviceKind.OTHER, total_bytes=GIB, free_bytes=2 * GIB)
    reading = MachineReading(MemorySnapshot(GIB, 0), (device,))
    with pytest.raises(InvalidRequest, match=r"devices\[0\]\.free"):
        write_machine_file(path, reading)
    with pytest.raises(InvalidRequest, match=r"host\.total"):
        write_machine_file(path, MachineReading(MemorySnapshot(-1, 0)))
    assert path.read_bytes() == before


# --- texts that are no machine file's ------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32", "latin-1"])
def test_a_file_that_is_not_utf8_is_refused_for_what_it_is(path: Path, encoding: str) -> None:
    card = {**CARD, "name": "Karte für alle"}
    text = json.dumps({"host": HOST, "devices": [card]}, ensure_ascii=False)
    path.write_bytes(text.encode(encoding))
    with pytest.raises(InvalidRequest) as caught:
        read_machine_file(path)
    assert str(path) in caught.value.message
    assert caught.value.metadata["field"] == "text"


def test_a_byte_order_mark_before_utf8_is_no_part_of_the_text(path: Path) -> None:
    text = json.dumps({"host": HOST, "devices": [CARD]})
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert simulated.machine_text(path) == text
    assert read_machine_file(path).devices[0].id == "gpu0"


@pytest.mark.parametrize("name", ["a`b", "a` - at `$.b", "`", "", "a\nb", " - at `$.devices[7]"])
@pytest.mark.parametrize("place", ["", "host", "devices[0]", "devices[0].processes[0]"])
def test_a_field_by_any_name_is_refused_by_its_name(path: Path, name: str, place: str) -> None:
    use: dict[str, Any] = {"pid": 1}
    card: dict[str, Any] = {**CARD, "processes": [use]}
    host: dict[str, Any] = dict(HOST)
    machine: dict[str, Any] = {"host": host, "devices": [card]}
    holders = {"": machine, "host": host, "devices[0]": card, "devices[0].processes[0]": use}
    holders[place][name] = 1
    path.write_text(json.dumps(machine))
    with pytest.raises(InvalidRequest) as caught:
        read_machine_file(path)
    assert caught.value.metadata["field"] == (f"{place}.{name}" if place else name)
    assert "only these fields" in caught.value.message


def test_a_value_that_reads_like_a_place_is_refused_at_its_own(path: Path) -> None:
    given_file(path, devices=[{**CARD, "kind": "x' - at `$.foo"}])
    with pytest.raises(InvalidRequest) as caught:
        read_machine_file(path)
    assert caught.value.metadata["field"] == "devices[0].kind"
    assert "'nvidia'" in caught.value.message
