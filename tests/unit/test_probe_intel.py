"""The Intel probe: what OpenVINO's listing means, and the real listing in its own process."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from modeld.shared.capacity import DeviceKind, DeviceReading
from modeld.supervisor.probes import ProbeReading
from modeld.supervisor.probes.intel import COMMAND, parse, read_intel

GIB = 1 << 30
MIB = 1 << 20
VERSION = "2026.4.1-22982-e213a147257-releases/2026/4"
FREE_UNTOLD = "the driver doesn't tell how much of its memory is free"
NO_OPENCL = (
    'Cannot load library "/opt/openvino/libs/libopenvino_intel_gpu_plugin.so": libOpenCL.so.1: '
    "cannot open shared object file: No such file or directory"
)

# As the real listing answered on a machine without an Intel GPU or NPU, but for its own path.
CPU_ONLY = {
    "openvino": VERSION,
    "devices": [
        {
            "name": "CPU",
            "properties": {
                "FULL_DEVICE_NAME": "Intel(R) Xeon(R) Processor",
                "DEVICE_TYPE": "integrated",
            },
            "errors": {
                "DEVICE_UUID": "Cannot get unsupported property: DEVICE_UUID",
                "DEVICE_PCI_INFO": "Cannot get unsupported property: DEVICE_PCI_INFO",
            },
        }
    ],
    "absent": {"GPU": NO_OPENCL, "NPU": "No available devices"},
}


def answer(*devices: dict[str, Any], **fields: Any) -> bytes:
    return json.dumps({"openvino": VERSION, "devices": list(devices), **fields}).encode()


def device(name: str, errors: dict[str, str] | None = None, **properties: Any) -> dict[str, Any]:
    return {"name": name, "properties": properties, "errors": errors or {}}


ARC = device(
    "GPU.1",
    FULL_DEVICE_NAME="Intel(R) Arc(TM) A770 Graphics (dGPU)",
    DEVICE_TYPE="discrete",
    DEVICE_UUID="8680A0560800000003000000000000FF",
    DEVICE_PCI_INFO="0000:03:00.0",
    GPU_DEVICE_TOTAL_MEM_SIZE=16 * GIB,
)


def test_without_an_intel_device_the_plugins_say_why() -> None:
    assert parse(json.dumps(CPU_ONLY).encode()) == ProbeReading(
        notes=(f"Intel GPU: {NO_OPENCL}.", "Intel NPU: No available devices.")
    )


def test_a_gpus_free_memory_is_unknown_and_its_total_is_kept() -> None:
    assert parse(answer(ARC)).devices == (
        DeviceReading(
            id="8680a0560800000003000000000000ff",
            name="Intel(R) Arc(TM) A770 Graphics (dGPU)",
            kind=DeviceKind.INTEL_GPU,
            total_bytes=16 * GIB,
            free_bytes=0,
            known=False,
            pci="0000:03:00.0",
            shared_memory=False,
            note=FREE_UNTOLD,
        ),
    )


def test_an_integrated_gpu_uses_the_hosts_memory() -> None:
    integrated = device("GPU.0", DEVICE_TYPE="integrated", GPU_DEVICE_TOTAL_MEM_SIZE=30 * GIB)
    first, second = parse(answer(integrated, ARC)).devices
    assert (first.id, first.name, first.shared_memory, first.known) == (
        "GPU.0",
        "GPU.0",
        True,
        False,
    )
    assert not second.shared_memory


def test_an_npus_free_memory_is_its_total_less_what_is_taken() -> None:
    npu = device(
        "NPU",
        FULL_DEVICE_NAME="Intel(R) AI Boost",
        DEVICE_TYPE="integrated",
        NPU_DEVICE_TOTAL_MEM_SIZE=16 * GIB,
        NPU_DEVICE_ALLOC_MEM_SIZE=256 * MIB,
    )
    (reading,) = parse(answer(npu)).devices
    assert reading.kind is DeviceKind.INTEL_NPU
    assert (reading.known, reading.shared_memory, reading.note) == (True, True, "")
    assert (reading.total_bytes, reading.free_bytes) == (16 * GIB, 16 * GIB - 256 * MIB)


@pytest.mark.parametrize(
    "sizes",
    [
        {"NPU_DEVICE_TOTAL_MEM_SIZE": 16 * GIB},
        {"NPU_DEVICE_ALLOC_MEM_SIZE": 0},
        {"NPU_DEVICE_TOTAL_MEM_SIZE": GIB, "NPU_DEVICE_ALLOC_MEM_SIZE": 2 * GIB},
        {"NPU_DEVICE_TOTAL_MEM_SIZE": 0, "NPU_DEVICE_ALLOC_MEM_SIZE": 0},
        {"NPU_DEVICE_TOTAL_MEM_SIZE": "16 GiB", "NPU_DEVICE_ALLOC_MEM_SIZE": 0},
    ],
)
def test_an_npu_that_does_not_tell_both_sizes_is_unknown(sizes: dict[str, Any]) -> None:
    (reading,) = parse(answer(device("NPU", **sizes))).devices
    assert not reading.known
    assert reading.free_bytes == 0


def test_each_property_that_failed_is_noted_in_the_plugins_words() -> None:
    words = {
        "DEVICE_TYPE": "Unsupported configuration key: DEVICE_TYPE",
        "GPU_DEVICE_TOTAL_MEM_SIZE": "clGetDeviceInfo, error code: -5",
    }
    (reading,) = parse(answer(device("GPU", errors=words))).devices
    assert reading.note == (
        "DEVICE_TYPE: Unsupported configuration key: DEVICE_TYPE; "
        f"GPU_DEVICE_TOTAL_MEM_SIZE: clGetDeviceInfo, error code: -5; {FREE_UNTOLD}"
    )
    assert (reading.known, reading.total_bytes, reading.shared_memory) == (False, 0, False)


@pytest.mark.parametrize("uuid", ["8680a056080000000300000000000000", "0" * 32, "nonsense", ""])
def test_devices_that_a_uuid_does_not_tell_apart_are_known_by_name(uuid: str) -> None:
    twins = [device(f"GPU.{n}", DEVICE_UUID=uuid) for n in range(2)]
    assert [reading.id for reading in parse(answer(*twins)).devices] == ["GPU.0", "GPU.1"]


def test_openvino_that_does_not_start_is_noted_in_its_words() -> None:
    assert parse(answer(error="libtbb.so.12: cannot open shared object file")).notes == (
        "OpenVINO: libtbb.so.12: cannot open shared object file.",
    )


@pytest.mark.parametrize(
    "junk",
    [b"", b"hello", b"[]", b'{"devices": 1}', b'{"devices": [{}]}', b"\xff\xfe", b"[" * 5000],
)
def test_an_answer_that_cannot_be_understood_is_a_note(junk: bytes) -> None:
    reading = parse(junk)
    assert reading.devices == ()
    assert reading.notes[0].startswith("OpenVINO: the listing gave no usable answer")


def test_an_answer_without_end_is_a_note() -> None:
    assert "can't be an answer" in parse(b" " * ((1 << 20) + 1)).notes[0]


# --- the process -------------------------------------------------------------------------------


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_listing_that_hangs_is_ended_and_noted() -> None:
    reading = read_intel(python("import time; time.sleep(600)"), timeout_s=0.5)
    assert reading.notes == ("OpenVINO: listing its devices took longer than 0.5 s.",)


@pytest.mark.parametrize(
    ("code", "ending"),
    [("import os; os.abort()", "SIGABRT"), ("raise SystemExit(3)", "exit code 3")],
)
def test_a_listing_that_crashes_is_noted(code: str, ending: str) -> None:
    assert read_intel(python(code)).notes == (f"OpenVINO: listing its devices failed ({ending}).",)


def test_a_listing_that_cannot_be_started_is_noted() -> None:
    assert "can't be started" in read_intel(["/nowhere/python"]).notes[0]


def test_the_real_listing_answers_with_or_without_openvino() -> None:
    reading = read_intel()
    if importlib.util.find_spec("openvino") is None:
        assert reading == ProbeReading(
            notes=(
                "Intel devices aren't looked for: OpenVINO isn't installed "
                "(pip install 'modeld[openvino]').",
            )
        )
    else:
        found = {device.kind for device in reading.devices}
        for kind, name in ((DeviceKind.INTEL_GPU, "GPU"), (DeviceKind.INTEL_NPU, "NPU")):
            said = any(note.startswith(f"Intel {name}: ") for note in reading.notes)
            assert said == (kind not in found)


FAKE = """
import os
__version__ = "2026.4.1"
os.write(1, b"a plugin says hello\\n")

class Pci:
    domain, bus, device, function = 0, 3, 0, 0

class Type:
    def __init__(self, name):
        self.name = name

TABLE = {
    ("GPU.0", "FULL_DEVICE_NAME"): "Intel(R) UHD Graphics (iGPU)",
    ("GPU.0", "DEVICE_TYPE"): Type("INTEGRATED"),
    ("GPU.0", "GPU_DEVICE_TOTAL_MEM_SIZE"): 33000000000,
    ("GPU.1", "FULL_DEVICE_NAME"): "Intel(R) Arc(TM) A770 Graphics (dGPU)",
    ("GPU.1", "DEVICE_TYPE"): Type("DISCRETE"),
    ("GPU.1", "DEVICE_PCI_INFO"): Pci(),
    ("GPU.1", "GPU_DEVICE_TOTAL_MEM_SIZE"): 17000000000,
}

class Core:
    available_devices = ["CPU", "GPU.0", "GPU.1"]

    def get_property(self, name, key):
        if name == "NPU":
            raise RuntimeError(
                "Exception from src/inference/src/cpp/core.cpp:268:\\n"
                "Exception from src/plugins/intel_npu/src/common/src/device_helpers.cpp:164:\\n"
                "No available devices\\n\\n"
            )
        if (name, key) not in TABLE:
            raise RuntimeError(
                "Exception from src/inference/src/cpp/core.cpp:268:\\n"
                "Unsupported property " + key + " by GPU plugin\\n"
            )
        return TABLE[name, key]
"""


def test_the_listing_asks_every_device_and_survives_plugins_that_print(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "openvino.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    reading = read_intel(COMMAND)
    assert reading.notes == ("Intel NPU: No available devices.",)
    first, second = reading.devices
    assert (first.name, first.total_bytes, first.shared_memory) == (
        "Intel(R) UHD Graphics (iGPU)",
        33000000000,
        True,
    )
    assert "DEVICE_UUID: Unsupported property DEVICE_UUID by GPU plugin" in first.note
    assert (second.pci, second.total_bytes, second.shared_memory) == (
        "0000:03:00.0",
        17000000000,
        False,
    )


def test_a_library_that_openvino_lacks_is_told_apart_from_openvino_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "openvino.py").write_text("import no_such_library_here")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert read_intel().notes == ("OpenVINO: No module named 'no_such_library_here'.",)
