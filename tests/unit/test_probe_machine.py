"""The machine's reading: what is live, what is kept, and which devices the engine uses."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from modeld.shared.capacity import DeviceKind, DeviceReading, MachineReading, MemorySnapshot
from modeld.shared.messages import EngineDevice
from modeld.supervisor.probes import ProbeReading
from modeld.supervisor.probes.machine import MachineProbe
from modeld.supervisor.probes.nvidia import NvidiaProbe
from modeld.supervisor.probes.simulated import read_machine_file, write_machine_file
from tests.support.nvml_recording import (
    NvmlRecording,
    RecordedDevice,
    a100_with_mig,
    card_6gb,
    card_24gb,
    unified_memory_card,
)

GIB = 1 << 30
HOST = MemorySnapshot(total_bytes=16 * GIB, available_bytes=12 * GIB)
ARC = DeviceReading(
    id="8680a056",
    name="Intel(R) Arc(TM) A770 Graphics (dGPU)",
    kind=DeviceKind.INTEL_GPU,
    total_bytes=16 * GIB,
    known=False,
    pci="0000:03:00.0",
)
CPU = EngineDevice(name="CPU", description="Intel(R) Xeon(R)", kind="cpu", total_bytes=16 * GIB)


def cuda(index: int, card: RecordedDevice, pci: str = "", kind: str = "gpu") -> EngineDevice:
    return EngineDevice(
        name=f"CUDA{index}",
        description=card.name,
        kind=kind,
        total_bytes=card.total,
        free_bytes=card.total // 2,
        pci=pci,
    )


def probe(
    *cards: RecordedDevice, intel: ProbeReading | None = None, **environ: str
) -> MachineProbe:
    nvml = NvmlRecording(*cards)
    return MachineProbe(
        lambda: HOST, NvidiaProbe(lambda: nvml, environ), lambda: intel or ProbeReading()
    )


def read(
    *cards: RecordedDevice,
    engine: tuple[EngineDevice, ...] = (),
    intel: ProbeReading | None = None,
    **environ: str,
) -> MachineReading:
    one = probe(*cards, intel=intel, **environ)
    one.attach_engine(engine)
    return one.read()


def names(reading: MachineReading) -> list[tuple[str, str]]:
    return [(device.engine_name, device.id) for device in reading.devices]


# --- reading -----------------------------------------------------------------------------------


def test_a_machine_is_its_host_its_devices_and_every_probes_notes() -> None:
    intel = ProbeReading((ARC,), ("Intel NPU: No available devices.",))
    reading = read(card_24gb(), intel=intel)
    assert reading.host == HOST
    assert reading.source == "live"
    assert [device.kind for device in reading.devices] == [DeviceKind.NVIDIA, DeviceKind.INTEL_GPU]
    assert reading.notes == ("Intel NPU: No available devices.",)


def test_nvidia_is_read_live_and_intel_is_listed_once_until_it_is_refreshed() -> None:
    listed: list[int] = []

    def list_intel() -> ProbeReading:
        listed.append(1)
        return ProbeReading((replace(ARC, note=f"listing {len(listed)}"),))

    card = card_24gb()
    nvml = NvmlRecording(card)
    one = MachineProbe(lambda: HOST, NvidiaProbe(lambda: nvml, {}), list_intel)
    free = one.read().devices[0].free_bytes
    card.used += GIB
    with ThreadPoolExecutor(4) as pool:
        readings = list(pool.map(lambda _: one.read(), range(8)))
    assert {reading.devices[0].free_bytes for reading in readings} == {free - GIB}
    assert {reading.devices[1].note for reading in readings} == {"listing 1"}
    one.refresh()
    assert one.read().devices[1].note == "listing 2"


def test_probes_that_break_are_notes_and_the_rest_is_read() -> None:
    class Broken:
        def read(self) -> ProbeReading:
            raise RuntimeError("the driver went away")

        def close(self) -> None: ...

    def fails() -> MemorySnapshot:
        raise OSError(5, "Input/output error")

    reading = MachineProbe(fails, Broken(), lambda: ProbeReading((ARC,))).read()
    assert not reading.host.known
    assert [device.id for device in reading.devices] == [ARC.id]
    assert reading.notes == (
        "The host's memory can't be read: [Errno 5] Input/output error.",
        "NVIDIA devices can't be read: the driver went away.",
    )


def test_unknown_host_memory_is_noted() -> None:
    unknown = MemorySnapshot(total_bytes=0, available_bytes=0, known=False)
    nvidia = NvidiaProbe(lambda: NvmlRecording(card_24gb()), {})
    reading = MachineProbe(lambda: unknown, nvidia, ProbeReading).read()
    assert reading.notes[0].startswith("The host's memory can't be read")


def test_this_machine_can_be_read() -> None:
    one = MachineProbe()
    reading = one.read()
    one.close()
    assert reading.host.known
    assert reading.host.total_bytes > 0
    assert reading.devices or len(reading.notes) >= 2  # NVIDIA's words and OpenVINO's


# --- the engine's devices ------------------------------------------------------------------------


def test_without_an_engine_nothing_can_be_placed_on_a_device() -> None:
    assert names(read(card_24gb(), engine=(CPU,))) == [("", card_24gb().uuid)]


def test_devices_are_matched_by_bus_and_come_in_the_engines_order() -> None:
    big, small = card_24gb(), card_6gb()
    engine = (CPU, cuda(0, small, "00000000:C1:00.0"), cuda(1, big, "0000:01:00.0"))
    intel = ProbeReading((ARC,))
    assert names(read(big, small, engine=engine, intel=intel)) == [
        ("CUDA0", small.uuid),
        ("CUDA1", big.uuid),
        ("", ARC.id),
    ]


def test_alike_cards_are_told_apart_by_bus() -> None:
    first, second = card_24gb(), card_24gb()
    second.uuid, second.bus = "GPU-second", "00000000:02:00.0"
    engine = (cuda(0, second, "0000:02:00.0"), cuda(1, first, "0000:01:00.0"))
    assert names(read(first, second, engine=engine)) == [
        ("CUDA0", "GPU-second"),
        ("CUDA1", first.uuid),
    ]


def test_a_name_that_only_one_has_matches_where_the_engine_tells_no_bus() -> None:
    big, small = card_24gb(), card_6gb()
    assert names(read(big, small, engine=(cuda(0, small), cuda(1, big)))) == [
        ("CUDA0", small.uuid),
        ("CUDA1", big.uuid),
    ]


def test_a_name_that_several_have_is_no_match_and_the_engines_device_is_added() -> None:
    first, second = card_24gb(), card_24gb()
    second.uuid, second.bus = "GPU-second", "00000000:02:00.0"
    reading = read(first, second, engine=(cuda(0, first),))
    assert names(reading) == [("CUDA0", "CUDA0"), ("", first.uuid), ("", "GPU-second")]


def test_a_card_of_the_same_name_on_another_bus_is_another_card() -> None:
    card = card_24gb()
    reading = read(card, engine=(cuda(0, card, "0000:99:00.0"),))
    assert names(reading) == [("CUDA0", "CUDA0"), ("", card.uuid)]


def test_live_memory_stands_not_what_the_engine_told_at_its_start() -> None:
    card = card_24gb()
    (device,) = read(card, engine=(cuda(0, card, "0000:01:00.0"),)).devices
    assert device.free_bytes == card.total - card.reserved - card.used


def test_what_only_the_engine_knows_is_added_with_what_it_told() -> None:
    radeon = EngineDevice(
        name="Vulkan0",
        description="AMD Radeon RX 7900",
        kind="gpu",
        total_bytes=20 * GIB,
        free_bytes=19 * GIB,
        pci="0000:0a:00.0",
    )
    (device, _) = read(card_24gb(), engine=(radeon,)).devices
    assert device == DeviceReading(
        id="Vulkan0",
        name="AMD Radeon RX 7900",
        kind=DeviceKind.OTHER,
        total_bytes=20 * GIB,
        free_bytes=19 * GIB,
        engine_name="Vulkan0",
        pci="0000:0a:00.0",
        note="only the engine lists it; memory as the engine told it when it started",
    )


@pytest.mark.parametrize(
    ("kind", "total", "free", "known", "shared"),
    [
        ("gpu", 0, 0, False, True),
        ("gpu", 8 * GIB, 0, False, False),
        ("gpu", 8 * GIB, 9 * GIB, False, False),
        ("igpu", 8 * GIB, 4 * GIB, True, True),
        ("igpu", 0, 0, False, True),
    ],
)
def test_memory_that_the_engine_does_not_tell_is_unknown(
    kind: str, total: int, free: int, known: bool, shared: bool
) -> None:
    one = EngineDevice(name="X0", description="X", kind=kind, total_bytes=total, free_bytes=free)
    (device, _) = read(card_24gb(), engine=(one,)).devices
    assert (device.known, device.shared_memory) == (known, shared)
    assert (device.total_bytes, device.free_bytes) == (total, free if known else 0)


def test_processors_and_what_helps_them_are_no_devices() -> None:
    blas = EngineDevice(name="BLAS", description="OpenBLAS", kind="accel")
    assert names(read(card_24gb(), engine=(CPU, blas))) == [("", card_24gb().uuid)]


def test_an_integrated_card_uses_the_hosts_memory() -> None:
    card = unified_memory_card()
    (device,) = read(card, engine=(cuda(0, card, "000f:01:00.0", kind="igpu"),)).devices
    assert (device.engine_name, device.shared_memory, device.known) == ("CUDA0", True, False)


def test_one_card_under_two_backends_is_counted_once() -> None:
    card = card_24gb()
    twice = replace_name(cuda(0, card, "0000:01:00.0"), "Vulkan0")
    reading = read(card, engine=(cuda(0, card, "0000:01:00.0"), twice))
    assert names(reading) == [("CUDA0", card.uuid)]
    assert reading.notes == ("Vulkan0 is the same device as CUDA0, and isn't used beside it.",)


def replace_name(device: EngineDevice, name: str) -> EngineDevice:
    return EngineDevice(
        name=name,
        description=device.description,
        kind=device.kind,
        total_bytes=device.total_bytes,
        free_bytes=device.free_bytes,
        pci=device.pci,
    )


def test_with_mig_the_engine_uses_an_instance_never_the_card() -> None:
    card = a100_with_mig()
    _, second = (one for one in card.instances if one is not None)
    engine = (cuda(0, second, "0000:3b:00.0"),)
    assert names(read(card, engine=engine))[0] == ("CUDA0", second.uuid)


def test_of_alike_mig_instances_the_one_that_is_not_hidden_is_used() -> None:
    card = a100_with_mig()
    first, second = (one for one in card.instances if one is not None)
    first.name = second.name
    engine = (cuda(0, second, "0000:3b:00.0"),)
    seen = read(card, engine=engine, CUDA_VISIBLE_DEVICES=second.uuid)
    assert names(seen)[0] == ("CUDA0", second.uuid)
    untold = read(card, engine=engine)
    assert [device.engine_name for device in untold.devices] == ["CUDA0", "", "", ""]
    assert untold.devices[0].kind is DeviceKind.OTHER


def test_another_engine_takes_the_place_of_the_first() -> None:
    card = card_24gb()
    one = probe(card)
    one.attach_engine([cuda(0, card, "0000:01:00.0")])
    assert names(one.read()) == [("CUDA0", card.uuid)]
    one.attach_engine([])
    assert names(one.read()) == [("", card.uuid)]


def test_a_live_reading_can_be_kept_as_a_file(tmp_path) -> None:
    card = a100_with_mig()
    reading = read(card, unified_memory_card(), intel=ProbeReading((ARC,), ("seen",)))
    path = tmp_path / "machine.json"
    write_machine_file(path, reading)
    assert read_machine_file(path) == replace(reading, source=str(path))
