"""Settings: precedence, and errors that say where a bad value stands."""

from __future__ import annotations

import logging
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modeld.supervisor.config import SETTINGS, Config, ConfigError, load_config
from modeld.supervisor.settings import BY_NAME, parse_size, parse_value, size_text

MIB = 1024 * 1024


def write(root: Path, text: str) -> None:
    (root / "modeld.toml").write_text(text)


def test_table_and_config_name_the_same_settings() -> None:
    assert {f.name for f in fields(Config)} - {"data_root", "sources"} == set(BY_NAME)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: s.name)
def test_every_default_is_allowed_and_described(setting) -> None:
    assert parse_value(setting, setting.default, "default") == setting.default
    assert setting.help
    assert setting.allowed


def test_flag_beats_variable_beats_file_beats_default(tmp_path: Path) -> None:
    write(tmp_path, "queue_limit = 10\nmax_sessions = 3\nidle_release_s = 7\n")
    env = {"MODELD_QUEUE_LIMIT": "20", "MODELD_MAX_SESSIONS": "4"}
    config = load_config({"queue_limit": 30, "max_sessions": None}, env, tmp_path)
    assert (config.queue_limit, config.max_sessions) == (30, 4)
    assert (config.idle_release_s, config.session_ttl_s) == (7.0, 600.0)
    sources = dict(config.sources)
    assert sources["queue_limit"] == "flag --queue-limit"
    assert sources["max_sessions"] == "variable MODELD_MAX_SESSIONS"
    assert sources["idle_release_s"].endswith("modeld.toml, line 3")
    assert "session_ttl_s" not in sources


def test_data_root_from_flag_then_variable_then_platform(tmp_path: Path) -> None:
    env = {"MODELD_DATA_ROOT": str(tmp_path / "env")}
    assert load_config({"data_root": str(tmp_path / "a")}, env).data_root == tmp_path / "a"
    assert load_config({}, env).data_root == tmp_path / "env"
    assert load_config({}, {}).data_root.name == "modeld"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("queue_limit = 0", "from 1 to 100000"),
        ("queue_limit = 1.5", "a whole number"),
        ("queue_limit = true", "a whole number"),
        ('queue_limit = "many"', "a whole number"),
        ("lease_ttl_s = 1", "from 3 to 3600"),
        ("session_ttl_s = nan", "a number of seconds"),
        ("max_window = 100", "or 0 (no limit)"),
        ('reserve_bytes = "2 bananas"', "like '512MiB'"),
        ('k_type = "q9"', "one of f16"),
        ("log_prompts = 2", "true or false"),
        ('listen = "nonsense"', "host:port"),
        ('listen = "127.0.0.1:99999"', "host:port"),
        ('backends = ["cuda"]', "a list of llama"),
        ('tls_cert = "/nowhere/x.pem"', "There is no such file"),
    ],
)
def test_bad_value_names_file_line_value_and_what_is_allowed(
    tmp_path: Path, line: str, words: str
) -> None:
    write(tmp_path, f"# settings\n\n{line}\n")
    with pytest.raises(ConfigError) as caught:
        load_config({}, {}, tmp_path)
    assert f"{tmp_path / 'modeld.toml'}, line 3" in caught.value.message
    assert words in caught.value.message
    assert caught.value.metadata["field"] == line.split(" ")[0]


def test_bad_variable_and_bad_flag_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="variable MODELD_THREADS: threads = 'x'"):
        load_config({}, {"MODELD_THREADS": "x"}, tmp_path)
    with pytest.raises(ConfigError, match="flag --n-batch: n_batch = 0"):
        load_config({"n_batch": 0}, {}, tmp_path)


def test_line_is_found_behind_a_multi_line_value_that_holds_the_same_text(tmp_path: Path) -> None:
    write(tmp_path, 'backends = [\n  "llama",\n]\n"queue_limit" = 0\n')
    with pytest.raises(ConfigError, match="line 4"):
        load_config({}, {}, tmp_path)
    write(tmp_path, 'nonsense = """\nqueue_limit = 1\n"""\nqueue_limit = 0\n')
    with pytest.raises(ConfigError, match=r"line 1: there is no setting 'nonsense'"):
        load_config({}, {}, tmp_path)


def test_unknown_key_table_and_flag_are_refused_with_a_near_name(tmp_path: Path) -> None:
    write(tmp_path, "\nqueue_limits = 3\n")
    with pytest.raises(ConfigError, match=r"line 2: .*'queue_limits'. Did you mean 'queue_limit'"):
        load_config({}, {}, tmp_path)
    write(tmp_path, "threads = 1\n[server]\nport = 3\n")
    with pytest.raises(ConfigError, match="line 2: there is no setting 'server'"):
        load_config({}, {}, tmp_path)
    with pytest.raises(ConfigError, match="flag --colour"):
        load_config({"colour": "red"}, {}, tmp_path / "empty")


def test_misspelt_variable_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        load_config({}, {"MODELD_QUEUE_LIMITS": "3"}, tmp_path)
    assert "MODELD_QUEUE_LIMIT" in caplog.text


def test_broken_toml_says_the_line(tmp_path: Path) -> None:
    write(tmp_path, "threads = 1\nqueue_limit = \n")
    with pytest.raises(ConfigError, match=r"not valid TOML: .*line 2"):
        load_config({}, {}, tmp_path)
    (tmp_path / "modeld.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_config({}, {}, tmp_path)


@pytest.mark.parametrize(
    ("text", "size"),
    [("512MiB", 512 * MIB), ("1.5 GiB", 1536 * MIB), ("2gb", 2_000_000_000), ("77", 77), ("0", 0)],
)
def test_sizes_are_read_in_every_form(tmp_path: Path, text: str, size: int) -> None:
    assert load_config({}, {"MODELD_RESERVE_BYTES": text}, tmp_path).reserve_bytes == size


@given(st.integers(min_value=0, max_value=1 << 50))
def test_size_text_reads_back_exactly(size: int) -> None:
    assert parse_size(size_text(size)) == size


def test_listening_beyond_loopback_needs_tls_with_client_certificates(tmp_path: Path) -> None:
    for host in ("0.0.0.0:50051", "[::]:50051", "example.org:50051", "192.168.1.2:1"):
        with pytest.raises(ConfigError, match="other machines"):
            load_config({"listen": host}, {}, tmp_path)
    for host in ("127.0.0.1:0", "[::1]:50051", "localhost:50051", "127.8.0.1:1"):
        assert load_config({"listen": host}, {}, tmp_path).listen == host
    pem = tmp_path / "x.pem"
    pem.write_text("x")
    tls = {"tls_cert": str(pem), "tls_key": str(pem)}
    with pytest.raises(ConfigError, match="client certificates"):
        load_config({"listen": "0.0.0.0:1", **tls}, {}, tmp_path)
    assert load_config({"listen": "0.0.0.0:1", **tls, "tls_client_ca": str(pem)}, {}, tmp_path).tls


def test_half_a_tls_configuration_is_refused(tmp_path: Path) -> None:
    pem = tmp_path / "x.pem"
    pem.write_text("x")
    with pytest.raises(ConfigError, match="together"):
        load_config({"tls_cert": str(pem)}, {}, tmp_path)
    with pytest.raises(ConfigError, match="needs tls_cert"):
        load_config({"tls_client_ca": str(pem)}, {}, tmp_path)
    with pytest.raises(ConfigError, match="unix socket has no TLS"):
        load_config({"tls_cert": str(pem), "tls_key": str(pem)}, {}, tmp_path)


def test_defaults_give_way_but_what_was_asked_for_must_agree(tmp_path: Path) -> None:
    config = load_config({"max_window": 2048, "n_batch": 128}, {}, tmp_path)
    assert (config.floor_window, config.n_ubatch) == (2048, 128)
    assert config.capacity_policy().floor_window == 2048
    with pytest.raises(ConfigError, match="flag --floor-window"):
        load_config({"max_window": 2048, "floor_window": 4096}, {}, tmp_path)
    with pytest.raises(ConfigError, match="n_ubatch \\(256\\) is more than n_batch"):
        load_config({"n_batch": 128, "n_ubatch": 256}, {}, tmp_path)


def test_a_what_if_lets_defaults_give_way_and_nothing_that_was_asked_for(tmp_path: Path) -> None:
    plain = load_config({}, {}, tmp_path)
    shorter = plain.with_settings({"max_window": "2048", "n_batch": "128"}, "what_if")
    assert (shorter.floor_window, shorter.n_ubatch) == (2048, 128)
    longer = shorter.with_settings({"max_window": "8192"}, "what_if")
    assert longer.floor_window == 4096, "as load_config would have it"
    narrow = load_config({"max_window": 2048}, {}, tmp_path)
    assert narrow.with_settings({"max_window": "0"}, "what_if").floor_window == 4096
    given = load_config({"floor_window": 4096, "n_ubatch": 512}, {}, tmp_path)
    with pytest.raises(ConfigError, match="floor_window \\(4096\\) is more than max_window"):
        given.with_settings({"max_window": "2048"}, "what_if")
    with pytest.raises(ConfigError, match="n_ubatch \\(512\\) is more than n_batch"):
        given.with_settings({"n_batch": "128"}, "what_if")
    with pytest.raises(ConfigError, match="what_if: floor_window"):
        plain.with_settings({"max_window": "2048", "floor_window": "4096"}, "what_if")


@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "iq4_nl"])
def test_quantised_values_are_refused_at_start_with_the_reason(tmp_path: Path, kind: str) -> None:
    with pytest.raises(ConfigError, match=r"flag --v-type: .*flash attention, which is off"):
        load_config({"v_type": kind}, {}, tmp_path)
    config = load_config({"v_type": "bf16", "k_type": kind}, {}, tmp_path)
    assert (config.k_type, config.v_type) == (kind, "bf16")


@pytest.mark.parametrize(
    "name", ["reserve_bytes", "user_limit_bytes", "device_reserve_bytes", "device_limit_bytes"]
)
@pytest.mark.parametrize("size", ["2EiB", str((1 << 60) + 1), "9" * 5000, "9" * 400 + ".5"])
def test_sizes_beyond_any_machine_are_refused(tmp_path: Path, name: str, size: str) -> None:
    with pytest.raises(ConfigError, match="from 0 to 1EiB") as caught:
        load_config({name: size}, {}, tmp_path)
    assert len(caught.value.message) < 500
    assert getattr(load_config({name: "1EiB"}, {}, tmp_path), name) == 1 << 60


@pytest.mark.parametrize("name", ["max_window", "floor_window"])
def test_windows_beyond_what_an_engine_takes_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="from 256 to 16777216"):
        load_config({name: 16_777_217}, {}, tmp_path)
    assert getattr(load_config({name: 16_777_216}, {}, tmp_path), name) == 16_777_216


@pytest.mark.parametrize(
    "line",
    [
        "reserve_bytes = " + "9" * 5000,
        "reserve_bytes = 0x" + "f" * 5000,
        "session_ttl_s = 1" + "0" * 400,
        "tensor_split = [1" + "0" * 400 + "]",
    ],
)
def test_numbers_that_nothing_holds_are_refused_as_settings_are(tmp_path: Path, line: str) -> None:
    write(tmp_path, line + "\n")
    with pytest.raises(ConfigError) as caught:
        load_config({}, {}, tmp_path)
    assert str(tmp_path / "modeld.toml") in caught.value.message
    assert len(caught.value.message) < 600


@pytest.mark.parametrize("shares", ["1e300,1", "3e38,3e38", "1e-50,1e-50", "1,1e7", "0,0", "nan,1"])
def test_shares_that_no_split_needs_are_refused(tmp_path: Path, shares: str) -> None:
    with pytest.raises(ConfigError, match=r"each 0 or from 0\.000001 to 1000000, not all 0"):
        load_config({"tensor_split": shares}, {}, tmp_path)
    assert load_config({"tensor_split": "0,1e-6,1e6"}, {}, tmp_path).tensor_split == (0, 1e-6, 1e6)


def test_the_policy_has_the_devices_that_were_named(tmp_path: Path) -> None:
    named = load_config({"devices": "CUDA0"}, {}, tmp_path).capacity_policy()
    assert named.devices == ("CUDA0",)
    none = load_config({"devices": "none"}, {}, tmp_path).capacity_policy()
    assert (none.devices, none.gpu_layers) == ((), 0)


def test_data_root_too_long_for_a_socket_gets_a_short_one_of_its_own(tmp_path: Path) -> None:
    long, other = tmp_path / ("d" * 100), tmp_path / ("e" * 100)
    path = load_config({}, {}, long).socket_path
    assert len(str(path).encode()) <= 107
    assert path == load_config({}, {}, long).socket_path
    assert path != load_config({}, {}, other).socket_path
    assert load_config({}, {}, tmp_path).socket_path == tmp_path / "modeld.sock"
