"""The NVIDIA probe, on recorded answers of NVML."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from modeld.shared.capacity import DeviceKind, DeviceReading, DeviceUse
from modeld.supervisor.probes import ProbeReading, pci_id
from modeld.supervisor.probes.nvidia import NvidiaProbe
from tests.support import nvml_recording as recorded
from tests.support.nvml_recording import (
    MIB,
    NvmlRecording,
    RecordedDevice,
    RecordedProcess,
    a100_with_mig,
    card_6gb,
    card_24gb,
    unified_memory_card,
)


def probe(nvml: NvmlRecording, **environ: str) -> NvidiaProbe:
    return NvidiaProbe(lambda: nvml, environ)


def read(*cards: RecordedDevice, **environ: str) -> ProbeReading:
    return probe(NvmlRecording(*cards), **environ).read()


# --- what is read ------------------------------------------------------------------------------


def test_a_card_is_read_with_its_uuid_bus_and_memory_without_what_the_driver_keeps() -> None:
    nvml = NvmlRecording(card_24gb(), names={4_000_101: "/usr/bin/python3"})
    reading = probe(nvml).read()
    assert reading.notes == ()
    (card,) = reading.devices
    assert card == DeviceReading(
        id="GPU-8932f937-d72c-4106-c12f-20bd9faed9f6",
        name="NVIDIA GeForce RTX 4090",
        kind=DeviceKind.NVIDIA,
        total_bytes=24564 * MIB,
        free_bytes=23000 * MIB,
        pci="0000:01:00.0",
        processes=(
            DeviceUse(4_000_101, 900 * MIB, "/usr/bin/python3"),
            DeviceUse(4_000_102, 264 * MIB),
        ),
    )


def test_reserved_memory_is_not_free_where_a_driver_counts_it_as_free() -> None:
    class CountsReserved(NvmlRecording):
        def nvmlDeviceGetMemoryInfo(self, handle: RecordedDevice, version: int | None = None):
            info = super().nvmlDeviceGetMemoryInfo(handle, version)
            info.free += handle.reserved
            return info

    (card,) = probe(CountsReserved(card_24gb())).read().devices
    assert card.free_bytes == 23000 * MIB


def test_several_unlike_cards_are_read_each_for_itself() -> None:
    first, second = read(card_24gb(), card_6gb()).devices
    assert (first.total_bytes, second.total_bytes) == (24564 * MIB, 6144 * MIB)
    assert second.free_bytes == 5944 * MIB
    assert second.pci == "0000:c1:00.0"
    assert first.id != second.id


@pytest.mark.parametrize("code", [recorded.FUNCTION_NOT_FOUND, recorded.NOT_SUPPORTED])
def test_memory_is_read_by_the_older_call_where_the_newer_one_is_missing(code: int) -> None:
    card = card_24gb()
    card.failures["nvmlDeviceGetMemoryInfo_v2"] = code
    (reading,) = read(card).devices
    assert reading.known
    assert (reading.total_bytes, reading.free_bytes) == (24564 * MIB, 23000 * MIB)


def test_mig_instances_are_devices_of_their_own_and_the_card_says_so() -> None:
    card, first, second = read(a100_with_mig()).devices
    assert card.known
    assert "MIG is on: engines see its 2 instances" in card.note
    assert card.processes == ()  # they are the instances'
    assert [one.parent for one in (first, second)] == [card.id] * 2
    assert first.id == "MIG-5c6db8bc-0000-0000-0000-000000000001"
    assert first.name == "NVIDIA A100-SXM4-40GB MIG 3g.20gb"
    assert (first.total_bytes, first.free_bytes) == (20096 * MIB, 19584 * MIB)
    assert (second.total_bytes, second.free_bytes) == (4864 * MIB, 4864 * MIB)
    assert [one.pci for one in (first, second)] == ["0000:3b:00.0"] * 2
    assert [use.bytes for use in first.processes] == [500 * MIB]
    assert (first.note, second.note) == ("", "")


def test_mig_without_instances_says_that_engines_see_nothing() -> None:
    card = a100_with_mig()
    card.instances = []
    (reading,) = read(card).devices
    assert "engines see nothing, for it has no instance" in reading.note


def test_mig_mode_that_changes_at_the_next_reset_is_told() -> None:
    card = a100_with_mig()
    card.mig, card.instances = [0, 1], []
    (reading,) = read(card).devices
    assert reading.note == "MIG will be on after the next reset"
    assert [use.bytes for use in reading.processes] == [500 * MIB]


def test_compute_instances_of_one_memory_slice_say_that_it_is_the_same_memory() -> None:
    card = a100_with_mig()
    for instance in card.instances:
        if instance is not None:
            instance.gpu_instance = 1
    _, first, second = read(card).devices
    assert first.note == ""
    assert second.note == f"its memory is the same as that of {first.id}"


def test_a_process_that_computes_and_draws_is_told_once() -> None:
    card = card_24gb()
    card.graphics = [RecordedProcess(4_000_101, 900 * MIB)]
    (reading,) = read(card).devices
    assert [(use.pid, use.bytes) for use in reading.processes] == [(4_000_101, 900 * MIB)]


@pytest.mark.parametrize("untold", [None, (1 << 64) - 1])
def test_process_whose_use_the_driver_does_not_tell_is_listed_and_noted(untold: int | None) -> None:
    card = card_24gb()
    card.compute.append(RecordedProcess(os.getpid(), untold))
    (reading,) = read(card).devices
    use = {one.pid: one for one in reading.processes}[os.getpid()]
    assert use.bytes == 0
    assert use.name  # NVML doesn't know it; the system does
    assert reading.note == "the driver doesn't tell what 1 of 3 processes hold"


def test_processes_are_those_of_this_reading_not_of_an_earlier_one() -> None:
    card = card_24gb()
    one = probe(NvmlRecording(card))
    assert len(one.read().devices[0].processes) == 2
    card.compute, card.graphics = [], []
    assert one.read().devices[0].processes == ()


# --- what fails --------------------------------------------------------------------------------


def test_missing_library_is_a_note_in_nvmls_words() -> None:
    reading = probe(NvmlRecording(init_fails=recorded.LIBRARY_NOT_FOUND)).read()
    assert reading.devices == ()
    assert reading.notes == (
        "NVIDIA: NVML Shared Library Not Found: no driver is installed, or this process can't "
        "see it.",
    )


def test_missing_binding_is_a_note() -> None:
    def fails() -> NvmlRecording:
        raise ImportError("No module named 'pynvml'")

    reading = NvidiaProbe(fails, {}).read()
    assert reading == ProbeReading(
        notes=("NVIDIA: nvidia-ml-py can't be imported: No module named 'pynvml'.",)
    )


def test_driver_that_is_loaded_later_is_found_by_a_later_reading() -> None:
    nvml = NvmlRecording(card_24gb(), init_fails=recorded.DRIVER_NOT_LOADED)
    one = probe(nvml)
    assert one.read().notes == ("NVIDIA: Driver Not Loaded.",)
    nvml.init_fails = 0
    assert len(one.read().devices) == 1


def test_no_device_is_a_note() -> None:
    assert read() == ProbeReading(notes=("NVIDIA: the driver lists no device.",))


def test_card_lost_in_the_middle_is_unknown_and_the_other_is_still_read() -> None:
    lost = card_24gb()
    lost.failures = dict.fromkeys(
        (
            "nvmlDeviceGetMemoryInfo_v2",
            "nvmlDeviceGetMigMode",
            "nvmlDeviceGetComputeRunningProcesses",
            "nvmlDeviceGetGraphicsRunningProcesses",
        ),
        recorded.GPU_IS_LOST,
    )
    nvml = NvmlRecording(lost, card_6gb())
    one = probe(nvml)
    first, second = one.read().devices
    assert first.id == lost.uuid
    assert not first.known
    assert first.note.startswith("memory: GPU is lost")
    assert second.known
    # What the driver forgot is asked of it anew.
    assert nvml.started == 0
    lost.failures = {}
    assert all(device.known for device in one.read().devices)


def test_card_that_cannot_even_be_opened_is_listed_as_unknown() -> None:
    closed = card_24gb()
    closed.failures["nvmlDeviceGetHandleByIndex"] = recorded.NO_PERMISSION
    first, second = read(closed, card_6gb()).devices
    assert (first.id, first.known, first.note) == (
        "nvidia:0",
        False,
        "NVML: Insufficient Permissions",
    )
    assert second.known


def test_unified_memory_is_unknown_and_planned_as_the_hosts() -> None:
    (reading,) = read(unified_memory_card()).devices
    assert not reading.known
    assert reading.shared_memory
    assert reading.pci == "000f:01:00.0"
    assert reading.note == (
        "memory: Not Supported; NVML tells no memory of its own: it uses the host's"
    )


def test_mig_instance_without_a_memory_answer_is_unknown_but_not_the_hosts() -> None:
    card = a100_with_mig()
    instance = card.instances[0]
    assert instance is not None
    instance.failures |= {
        "nvmlDeviceGetMemoryInfo_v2": recorded.NOT_SUPPORTED,
        "nvmlDeviceGetMemoryInfo": recorded.NOT_SUPPORTED,
    }
    _, first, _ = read(card).devices
    assert (first.known, first.shared_memory) == (False, False)


@pytest.mark.parametrize(
    ("call", "note"),
    [
        ("nvmlDeviceGetMemoryInfo_v2", "memory: Insufficient Permissions"),
        ("nvmlDeviceGetMigMode", "MIG mode: Insufficient Permissions"),
        ("nvmlDeviceGetPciInfo", "PCI bus: Insufficient Permissions"),
        ("nvmlDeviceGetName", "name: Insufficient Permissions"),
        ("nvmlDeviceGetUUID", "uuid: Insufficient Permissions"),
        ("nvmlDeviceGetComputeRunningProcesses", "compute processes: Insufficient Permissions"),
        ("nvmlDeviceGetGraphicsRunningProcesses", "graphics processes: Insufficient Permissions"),
    ],
)
def test_every_refused_call_is_noted_and_the_rest_is_read(call: str, note: str) -> None:
    card = card_24gb()
    card.failures[call] = recorded.NO_PERMISSION
    (reading,) = read(card).devices
    assert reading.note == note
    assert reading.known == (not call.startswith("nvmlDeviceGetMemory"))


def test_a_total_of_zero_is_unknown_never_an_empty_card() -> None:
    card = card_24gb()
    card.total = card.reserved = card.used = 0
    (reading,) = read(card).devices
    assert not reading.known
    assert "0 bytes in all" in reading.note


def test_binding_that_fails_in_its_own_way_is_a_note() -> None:
    class Broken(NvmlRecording):
        def nvmlDeviceGetCount(self) -> int:
            raise OSError("exec format error")

    assert probe(Broken()).read().notes == ("NVIDIA: exec format error.",)


# --- the library's life ------------------------------------------------------------------------


def test_nvml_is_started_once_for_many_readings_and_let_go_politely() -> None:
    nvml = NvmlRecording(card_24gb())
    one = probe(nvml)
    for _ in range(5):
        one.read()
    assert nvml.calls["nvmlInit"] == 1
    one.close()
    one.close()
    assert nvml.calls["nvmlShutdown"] == 1
    assert len(one.read().devices) == 1


def test_threads_read_one_after_the_other() -> None:
    class Watched(NvmlRecording):
        inside = 0

        def nvmlDeviceGetName(self, handle: RecordedDevice) -> str:
            self.inside += 1
            together = self.inside
            waiting.wait(0.01)
            self.inside -= 1
            assert together == 1
            return super().nvmlDeviceGetName(handle)

    waiting = threading.Event()
    nvml = Watched(card_24gb(), card_6gb())
    one = probe(nvml)
    with ThreadPoolExecutor(4) as pool:
        readings = list(pool.map(lambda _: one.read(), range(8)))
    assert all(reading == readings[0] for reading in readings)
    assert readings[0].devices[0].name == "NVIDIA GeForce RTX 4090"
    assert nvml.calls["nvmlInit"] == 1


def test_this_machine_can_be_asked_whatever_it_has() -> None:
    one = NvidiaProbe()
    reading = one.read()
    one.close()
    assert reading.devices or reading.notes[0].startswith("NVIDIA: ")


# --- CUDA_VISIBLE_DEVICES ----------------------------------------------------------------------

BIG, SMALL = card_24gb().uuid, card_6gb().uuid


def hidden(value: str | None, *cards: RecordedDevice, order: str = "") -> dict[str, bool | None]:
    """By device id: hidden, seen, or None where the note says that it isn't known."""
    environ = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    if order:
        environ["CUDA_DEVICE_ORDER"] = order
    reading = read(*(cards or (card_24gb(), card_6gb())), **environ)
    return {
        device.id: None
        if "doesn't tell whether engines see it" in device.note
        else "hidden from engines by CUDA_VISIBLE_DEVICES=" in device.note
        for device in reading.devices
    }


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, (False, False)),
        ("", (True, True)),
        ("-1", (True, True)),
        ("NoDevFiles", (True, True)),
        (BIG, (False, True)),
        ("GPU-1b2c", (True, False)),  # cut short, as long as it names one
        ("GPU-", (True, True)),
        (f"{SMALL},{BIG}", (False, False)),
        (f"{BIG},GPU-nothing,{SMALL}", (False, True)),  # the list ends at what names nothing
        ("1,0", (False, False)),
        ("0,7,1", (None, None)),
        ("0", (None, None)),  # in CUDA's own order
    ],
)
def test_devices_that_engines_do_not_see_are_named(
    value: str | None, expected: tuple[bool | None, bool | None]
) -> None:
    assert hidden(value) == dict(zip((BIG, SMALL), expected, strict=True))


def test_indices_are_understood_in_bus_order_and_with_one_card() -> None:
    assert hidden("1", order="PCI_BUS_ID") == {BIG: True, SMALL: False}
    assert hidden("0", card_24gb()) == {BIG: False}


def test_mig_instances_are_seen_by_their_own_name() -> None:
    card = a100_with_mig()
    first, second = (one.uuid for one in card.instances if one is not None)
    assert hidden(first, card) == {card.uuid: True, first: False, second: True}
    assert hidden("0", card) == {card.uuid: False, first: None, second: None}
    assert hidden("", card) == {card.uuid: True, first: True, second: True}


def test_what_is_hidden_stands_in_the_readings_notes_too() -> None:
    assert read(card_24gb(), card_6gb(), CUDA_VISIBLE_DEVICES="").notes == (
        "CUDA_VISIBLE_DEVICES='' hides from engines: every NVIDIA device.",
    )
    assert read(card_24gb(), card_6gb(), CUDA_VISIBLE_DEVICES=BIG).notes == (
        f"CUDA_VISIBLE_DEVICES='{BIG}' hides from engines: {SMALL}.",
    )


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("00000000:01:00.0", "0000:01:00.0"),
        ("0000:C1:00.0", "0000:c1:00.0"),
        ("0000000F:01:00.0", "000f:01:00.0"),
        ("01:00.0", "0000:01:00.0"),
        ("10000:e1:00.0", "10000:e1:00.0"),
        ("0000:01:00.0-v1", ""),
        ("", ""),
    ],
)
def test_bus_ids_are_written_one_way(text: str, normal: str) -> None:
    assert pci_id(text) == normal
