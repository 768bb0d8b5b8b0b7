"""`modeld doctor`: what it finds, how grave it takes it, and that every finding has a remedy."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

import modeld as package
from modeld.cli import checks
from modeld.cli.checks import Finding, Level
from modeld.cli.exit_codes import Exit
from modeld.client.convert import from_proto
from modeld.client.values_capacity import Device, Machine
from modeld.client.values_daemon import Description, DiskStats
from modeld.shared import lease_record
from modeld.shared.asking import AskAnswer
from modeld.shared.errors import DigestMismatch, ShuttingDown
from modeld.shared.messages import EngineDevice
from modeld.supervisor import asking
from modeld.v1 import session_pb2
from tests.support import fake_daemon, tiny_models
from tests.support.fake_daemon import FakeDaemon

MACHINE = from_proto(Machine, fake_daemon.machine())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    path: Path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    return tiny_models.qwen2(path)


def told(result: Result) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def level_of(answer: dict[str, Any], words: str) -> str:
    """The level of the only finding with these words. Each but an ok one has a remedy."""
    for finding in answer["findings"]:
        assert (finding["level"] == "ok") == (not finding["remedy"]), finding
    (found,) = [one["level"] for one in answer["findings"] if words in one["text"]]
    return str(found)


def only(findings: list[Finding]) -> Finding:
    (finding,) = findings
    return finding


# --- on real parts -------------------------------------------------------------------------------


def test_with_no_daemon_and_no_store_it_says_so_and_leaves_nothing_behind(modeld, root):
    result = modeld("doctor", "--json")
    answer = told(result)
    assert result.exit_code == 0
    assert answer["healthy"] is True
    assert answer["state"] == "NOT_RUNNING"
    assert level_of(answer, "No daemon runs") == "note"
    assert level_of(answer, "there is no store") == "note"
    assert level_of(answer, answer["engine"]["backend_version"]) == "ok"
    assert answer["engine"]["backend_version"].startswith("llama-cpp-python ")
    assert any(device["name"] == "CPU" for device in answer["engine"]["devices"])
    assert list(root.iterdir()) == []


def test_a_data_root_that_does_not_exist_is_no_trouble(modeld, root):
    result = modeld("--data-root", root / "not" / "there", "doctor")
    assert result.exit_code == 0
    assert not (root / "not").exists()


def test_models_of_the_store_are_planned_here_with_the_engine_asked(modeld, root, tiny):
    assert modeld("models", "import", tiny, "--name", "mine").exit_code == 0
    answer = told(modeld("doctor", "--json"))
    assert level_of(answer, "mine: fits") == "ok"
    (model,) = answer["models"]
    assert model["fits"] is True
    assert model["window"] == tiny_models.CONTEXT
    assert "mine: fits, a window of 2,048 tokens" in modeld("doctor").stdout


def test_a_model_that_does_not_fit_is_a_warning_with_what_to_type(modeld, root, tiny):
    modeld("models", "import", tiny, "--name", "mine")
    (root / "modeld.toml").write_text("user_limit_bytes = '1MiB'\n")
    result = modeld("doctor", "--json")
    answer = told(result)
    assert result.exit_code == 0
    assert level_of(answer, "mine: doesn't fit") == "warning"
    (remedy,) = [f["remedy"] for f in answer["findings"] if "doesn't fit" in f["text"]]
    assert "modeld serve --user-limit-bytes" in remedy
    assert answer["models"][0]["fits"] is False


def test_a_model_whose_file_was_changed_is_a_problem_and_the_others_are_still_told(
    modeld, root, tiny
):
    modeld("models", "import", tiny, "--name", "good", "--copy")
    modeld("models", "import", tiny, "--name", "hurt", "--copy")
    with (root / "models" / "hurt" / "model.gguf").open("ab") as file:
        file.write(b"x")
    result = modeld("doctor", "--json")
    assert result.exit_code == Exit.UNEXPECTED
    assert int(Exit.UNEXPECTED) == 1
    answer = told(result)
    assert level_of(answer, "hurt: ") == "problem"
    assert level_of(answer, "good: fits") == "ok"


def test_settings_that_cannot_be_used_are_a_problem_and_the_rest_is_still_told(modeld, root, tiny):
    modeld("models", "import", tiny, "--name", "mine")
    (root / "modeld.toml").write_text("max_sessions = 'many'\n")
    result = modeld("doctor", "--json")
    assert result.exit_code == 1
    answer = told(result)
    assert level_of(answer, "max_sessions") == "problem"
    assert level_of(answer, "mine: fits") == "ok"


def test_what_is_recorded_here_can_be_planned_for_elsewhere(modeld, root, tiny, tmp_path):
    recorded = tmp_path / "machine.json"
    answer = told(modeld("doctor", "--record", recorded, "--json"))
    result = modeld("plan", tiny, "--device", recorded, "--json")
    assert result.exit_code == 0
    machine = told(result)["machine"]
    assert machine["source"] == str(recorded)
    assert {**machine, "source": "live"} == answer["machine"]


def test_a_record_that_cannot_be_written_is_refused(modeld, root):
    result = modeld("doctor", "--record", root / "no" / "folder.json")
    assert result.exit_code == Exit.USAGE
    assert "folder.json" in result.stderr


# --- what runs -----------------------------------------------------------------------------------


def test_a_running_daemon_is_told_with_its_worker(modeld, daemon):
    answer = told(modeld("doctor", "--json"))
    assert answer["state"] == "RUNNING"
    assert level_of(answer, "daemon 0.1.0, pid") == "ok"
    assert level_of(answer, "worker llama: IDLE") == "ok"
    assert answer["daemon"]["pid"] == os.getpid()


def test_a_running_daemon_is_asked_about_the_models_of_its_store(modeld, daemon, root, tiny):
    for name in ("tiny", "none"):  # the fake knows the first only
        (root / "models" / name).mkdir(parents=True)
    answer = told(modeld("doctor", "--json"))
    assert level_of(answer, "tiny: fits, a window of 4,096 tokens") == "ok"
    assert level_of(answer, "No model is named 'none'") == "problem"
    asked = daemon.world.requests_of(session_pb2.DescribeRequest)
    assert [request.model for request in asked] == ["none", "tiny"]


def test_a_stale_lease_is_a_warning_that_a_new_daemon_mends(modeld, root):
    with subprocess.Popen([sys.executable, "-c", "pass"]) as ended:
        pass
    fake_daemon.write_lease(root, "gone", "unix:/nowhere", pid=ended.pid)
    result = modeld("doctor", "--json")
    assert result.exit_code == 0
    assert level_of(told(result), "the lease is stale") == "warning"


def test_a_lease_that_nobody_can_read_is_a_problem(modeld, root):
    lease_record.lease_path(root).write_text("{")
    result = modeld("doctor", "--json")
    assert result.exit_code == 1
    assert level_of(told(result), "the lease is stale") == "problem"


def test_a_daemon_that_holds_the_lease_and_does_not_answer_is_a_problem(modeld, root):
    fake_daemon.write_lease(root, "silent", f"unix:{root}/nobody.sock")
    result = modeld("doctor", "--json")
    assert result.exit_code == 1
    assert level_of(told(result), "doesn't answer") == "problem"


def worker(**changes: Any) -> list[Finding]:
    """Findings on a daemon whose worker or slot is otherwise than well."""
    with tempfile.TemporaryDirectory(prefix="md") as folder, FakeDaemon(Path(folder)):
        from modeld.client import Client

        with Client.connect(folder) as client:
            status = client.status()
    slot = status.slots[0]
    slot = replace(slot, worker=replace(slot.worker, **changes))
    return checks.daemon(replace(status, slots=(slot,)), status.version)[1:]


@pytest.mark.parametrize(
    ("changes", "level"),
    [
        ({}, Level.OK),
        ({"last_death": "SIGSEGV", "restarts": 1}, Level.NOTE),
        ({"state": "BACKOFF"}, Level.WARNING),
        ({"state": "FAILED", "last_death": "exit code 70"}, Level.PROBLEM),
    ],
)
def test_a_worker_is_judged_by_its_state_and_its_last_death(changes, level):
    finding = only(worker(**changes))
    assert finding.level is level
    assert changes.get("last_death", "") in finding.text


def test_another_version_and_a_quarantined_model_are_told(daemon, root):
    from modeld.client import Client

    with Client.connect(root) as client:
        status = replace(client.status(), quarantined_models=("bad",), version="9.9")
    version, _, quarantined = checks.daemon(status, package.__version__)
    assert version.level is Level.WARNING
    assert "9.9" in version.text
    assert quarantined.level is Level.PROBLEM
    assert "modeld models clear bad" in quarantined.remedy


# --- what is installed ---------------------------------------------------------------------------


def test_without_an_engine_it_still_works_and_says_how_to_get_one(modeld, monkeypatch):
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    monkeypatch.setattr(
        asking, "ask_engine", lambda *_: AskAnswer(loader="unknown", words="exit code 1")
    )
    result = modeld("doctor")
    assert result.exit_code == 1
    assert "llama-cpp-python isn't installed" in result.stdout
    assert "do: pip install 'modeld[llama]'" in result.stdout


VERSIONS = {"modeld": "1", "python": "3.11", checks.LLAMA: "0.3.36"}


def test_an_engine_that_does_not_start_is_told_in_its_own_words():
    answer = AskAnswer(loader="unknown", words="asking the engine ended with signal SIGILL")
    found = checks.installed(VERSIONS, answer)[1]
    assert found.level is Level.PROBLEM
    assert "SIGILL" in found.text
    assert "0.3.36" in found.remedy


@pytest.mark.parametrize(("kind", "words"), [("gpu", "GPU offload to CUDA0"), ("accel", "no GPU")])
def test_whether_the_engine_offloads_is_told_from_its_own_devices(kind, words):
    answer = AskAnswer(
        loader="unknown",
        backend_version="llama-cpp-python 0.3.36",
        devices=[EngineDevice(name="CUDA0", description="card", kind=kind)],
    )
    found = checks.installed(VERSIONS, answer)[1]
    assert found.level is Level.OK
    assert words in found.text


OPENVINO = AskAnswer(
    loader="unknown",
    backend_version="openvino 2026.4.1",
    build_digest="ab" * 32,
    devices=[EngineDevice(name="CPU", description="", kind="cpu")],
)
INSTALLED = dict.fromkeys(checks.OPENVINO_PACKAGES, "2026.4.1")


@pytest.mark.parametrize(
    ("versions", "answer", "backends", "device", "level", "words"),
    [
        ({}, AskAnswer(loader="unknown"), ("llama",), "CPU", Level.NOTE, "isn't installed"),
        ({}, AskAnswer(loader="unknown"), ("openvino",), "CPU", Level.PROBLEM, "backends names"),
        (INSTALLED, OPENVINO, ("llama",), "CPU", Level.OK, "doesn't name it"),
        (INSTALLED, OPENVINO, ("llama", "openvino"), "CPU", Level.OK, "runs on CPU"),
        (INSTALLED, OPENVINO, ("openvino",), "GPU", Level.PROBLEM, "openvino_device is GPU"),
        (
            INSTALLED,
            AskAnswer(loader="unknown", words="no such library"),
            ("openvino",),
            "CPU",
            Level.PROBLEM,
            "no such library",
        ),
    ],
)
def test_openvino_is_judged_by_whether_the_settings_name_it(
    versions, answer, backends, device, level, words
):
    finding = checks.openvino(versions, answer, backends, device)[-1]
    assert finding.level is level
    assert words in finding.text
    assert finding.remedy or level is Level.OK


# --- the machine ---------------------------------------------------------------------------------


def device(**changes: Any) -> Device:
    return replace(MACHINE.devices[0], **changes)


def findings_of(*devices: Device) -> list[Finding]:
    read = replace(MACHINE, devices=devices, notes=(), swap_free_bytes=MACHINE.swap_total_bytes)
    return checks.machine(read, "0.3.36")[1:]


def test_an_accelerator_that_no_engine_here_can_use_comes_with_how_to_build_one():
    finding = only(findings_of(device(engine_name="")))
    assert finding.level is Level.WARNING
    assert "Fake 3060" in finding.text
    assert 'CMAKE_ARGS="-DGGML_CUDA=on" pip install' in finding.remedy
    assert "llama-cpp-python==0.3.36" in finding.remedy
    intel = only(findings_of(device(engine_name="", kind="intel_gpu")))
    assert "-DGGML_VULKAN=on" in intel.remedy


def test_a_device_that_the_engine_uses_is_ok_unless_its_memory_is_unknown():
    assert only(findings_of(device())).level is Level.OK
    unknown = only(findings_of(device(known=False, note="NVML: GPU is lost")))
    assert unknown.level is Level.WARNING
    assert "GPU is lost" in unknown.text


def test_a_card_that_is_used_by_its_instances_is_no_warning():
    card = device(engine_name="", id="card")
    card_found, instance_found = findings_of(card, device(id="mig", parent="card"))
    assert (card_found.level, instance_found.level) == (Level.OK, Level.OK)


@pytest.mark.parametrize(("free", "level"), [(0.9, Level.NOTE), (0.1, Level.WARNING)])
def test_swap_in_use_is_told_and_much_of_it_is_a_warning(free, level):
    read = replace(MACHINE, swap_free_bytes=int(MACHINE.swap_total_bytes * free), devices=())
    assert [f.level for f in checks.machine(read, "") if "of swap is in use" in f.text] == [level]


def test_a_host_that_cannot_be_read_is_a_problem_and_a_probes_words_are_kept():
    read = replace(MACHINE, host_known=False, devices=(), notes=("NVML: no driver",))
    found = checks.machine(read, "")
    assert found[0].level is Level.PROBLEM
    assert any(f.text == "NVML: no driver" and f.level is Level.NOTE for f in found)


# --- models --------------------------------------------------------------------------------------


def described(window: int) -> Description:
    answer = session_pb2.DescribeResponse(
        resolution=fake_daemon.planned(session_pb2.DescribeRequest(window=window))
    )
    return from_proto(Description, answer)


def test_a_memory_limit_below_a_models_need_is_named_beside_the_refusal():
    refusal, limit = checks.model("big", described(30000), 1 << 31)
    assert "modeld plan big --ctx" in refusal.remedy
    assert limit.level is Level.WARNING
    assert "needs 5.0 GB" in limit.text
    assert "MemoryMax" in limit.remedy
    assert len(checks.model("big", described(30000), 0)) == 1


def test_what_the_store_refuses_is_told_in_its_words():
    finding = only(checks.model("hurt", DigestMismatch("it was changed"), 0))
    assert (finding.level, "it was changed" in finding.text) == (Level.PROBLEM, True)
    assert "--replace" in finding.remedy
    busy = only(checks.model("well", ShuttingDown("it ends"), 0))
    assert "--replace" not in busy.remedy


# --- what the system grants ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("soft", "hard", "level", "words"),
    [
        (-1, -1, Level.OK, ""),
        (4096, 4096, Level.OK, ""),
        (256, 4096, Level.WARNING, "ulimit -n 1024"),
        (256, 256, Level.WARNING, "LimitNOFILE"),
    ],
)
def test_too_few_open_files_come_with_how_to_have_more(soft, hard, level, words):
    finding = checks.open_files(soft, hard)
    assert finding.level is level
    assert words in finding.remedy


def test_damaged_snapshots_are_named_with_what_to_do():
    kept = DiskStats("/data", 0, 3 << 20, 9, 9, durable_bytes=1 << 20, quota_bytes=1 << 30)
    assert checks.saved(kept).level is Level.OK
    assert "4.2 MB of the 1.1 GB" in checks.saved(kept).text
    full = checks.saved(replace(kept, quota_bytes=4 << 20))
    assert (full.level, "nothing more is saved" in full.text) == (Level.WARNING, True)
    assert "close KEY --discard" in full.remedy
    finding = checks.saved(replace(kept, damaged_snapshots=tuple("abcde")))
    assert finding.level is Level.WARNING
    assert "a, b, c and 2 more" in finding.text
    assert "delete them" in finding.remedy


@pytest.mark.parametrize(
    ("free", "level"), [(1 << 40, Level.OK), (1 << 29, Level.WARNING), (1000, Level.PROBLEM)]
)
def test_disk_space_is_judged_by_what_is_free(free, level):
    assert checks.disk("/data", free, 1 << 41).level is level


# --- the commands beside it ----------------------------------------------------------------------


def test_status_shows_the_accelerators_and_what_probes_said(modeld, daemon):
    text = modeld("status").stdout
    for words in ("Fake 3060", "CUDA0", "5.4 GB", "game 77 (1.1 GB)", "Intel: none listed"):
        assert words in text
    assert told(modeld("status", "--json"))["machine"]["devices"][0]["name"] == "Fake 3060"


def test_describe_shows_devices_findings_and_a_refusal_with_remedies(modeld, daemon):
    result = modeld("describe", "tiny", "--window", "30000")
    assert result.exit_code == 0  # it describes: `modeld plan` is for scripts
    for words in (
        "Fake 3060",
        "the engine reads 4",
        "refused: Not enough memory",
        "modeld plan tiny --ctx",
    ):
        assert words in result.stdout


def test_serve_names_what_lists_of_names_and_shares_look_like(modeld):
    text = modeld("serve", "--help").stdout
    assert "--devices NAME,NAME" in text
    assert "--tensor-split N,N" in text
