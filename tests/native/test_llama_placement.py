"""Where the llama engine is told to put a model, and what it reports of where it went.

The log lines are in the engine's own formats, as a machine with two GPUs prints them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest

from modeld.shared.capacity import LayerFacts, MemorySnapshot, ModelFacts
from modeld.shared.errors import InsufficientMemory, InvalidRequest, ModelNotActive
from modeld.shared.messages import LoadOp, LoadResult, OpenOp, OpenResult, PlacedOut
from modeld.workers.core import SessionCore
from modeld.workers.llama import devices, host, parameters, reports
from modeld.workers.llama.engine import LlamaEngine
from modeld.workers.llama.native import llama
from modeld.workers.memory_guard import MemoryGuard
from tests.support import tiny_models
from tests.support.core_harness import FakeOp

MIB = 1024 * 1024

TWO_GPUS_LOAD = """
load_tensors: loading model tensors, this can take a while... (load_mode = mmap)
load_tensors: offloading output layer to GPU
load_tensors: offloading 29 repeating layers to GPU
load_tensors: offloaded 30/33 layers to GPU
load_tensors:   CPU_Mapped model buffer size =   612.50 MiB
load_tensors:    CUDA_Host model buffer size =     1.25 MiB
load_tensors:        CUDA0 model buffer size =  1968.47 MiB
load_tensors:        CUDA1 model buffer size =  2102.03 MiB
""".strip().splitlines()

TWO_GPUS_CONTEXT = """
llama_context: n_ctx                 = 8192
llama_context:  CUDA_Host  output buffer size =     0.98 MiB
llama_kv_cache:        CPU KV buffer size =    96.00 MiB
llama_kv_cache:      CUDA0 KV buffer size =   448.00 MiB
llama_kv_cache:      CUDA1 KV buffer size =   480.00 MiB
llama_kv_cache: size = 1024.00 MiB (  8192 cells,  32 layers,  2/1 seqs), K (f16):  512.00 MiB, V (f16):  512.00 MiB
sched_reserve: reserving ...
sched_reserve:      CUDA0 compute buffer size =   560.00 MiB
sched_reserve:      CUDA1 compute buffer size =   669.48 MiB
sched_reserve:  CUDA_Host compute buffer size =    24.01 MiB
sched_reserve: graph: nodes = 1030, splits = 3, input objects = 8, input tensors = 12
""".strip().splitlines()  # noqa: E501

HYBRID_CONTEXT = """
llama_kv_cache:      CUDA0 KV buffer size =    24.00 MiB
llama_kv_cache: size =   24.00 MiB (  1024 cells,  12 layers,  2/1 seqs), K (f16):   12.00 MiB, V (f16):   12.00 MiB
llama_memory_recurrent:        CPU RS buffer size =     1.50 MiB
llama_memory_recurrent:      CUDA0 RS buffer size =    73.88 MiB
llama_memory_recurrent: size =   75.38 MiB (     2 cells,  48 layers,  2 seqs  0 rs_seq), R (f32):    3.38 MiB, S (f32):   72.00 MiB, P (f32):    0.00 MiB
""".strip().splitlines()  # noqa: E501

WINDOWED_DRY_RUN = """
llama_kv_cache_iswa: creating non-SWA KV cache, size = 4096 cells
llama_kv_cache:        CPU KV buffer size =     0.00 MiB
llama_kv_cache: size =   80.00 MiB (  4096 cells,   5 layers,  2/1 seqs), K (f16):   40.00 MiB, V (f16):   40.00 MiB
llama_kv_cache_iswa: creating     SWA KV cache, size = 2560 cells
llama_kv_cache:        CPU KV buffer size =     0.00 MiB
llama_kv_cache: size =  290.01 MiB (  2560 cells,  29 layers,  2/1 seqs), K (f16):  145.00 MiB, V (f16):  145.00 MiB
""".strip().splitlines()  # noqa: E501


def mib(number: float) -> int:
    return round(number * MIB)


# --- what the engine says ----------------------------------------------------------------------


def test_weights_are_told_by_device_and_mapped_or_pinned_memory_is_the_hosts() -> None:
    assert reports.weights_by_device(TWO_GPUS_LOAD) == {
        "CPU": mib(613.75),
        "CUDA0": mib(1968.47),
        "CUDA1": mib(2102.03),
    }
    assert reports.offloaded_layers(TWO_GPUS_LOAD) == 30
    assert reports.offloaded_layers([]) == 0


def test_a_contexts_kv_and_buffers_are_told_by_device() -> None:
    assert reports.kv_by_device(TWO_GPUS_CONTEXT) == {
        "CPU": 96 * MIB,
        "CUDA0": 448 * MIB,
        "CUDA1": 480 * MIB,
    }
    assert reports.compute_by_device(TWO_GPUS_CONTEXT) == {
        "CPU": mib(24.99),
        "CUDA0": 560 * MIB,
        "CUDA1": mib(669.48),
    }
    rows = reports.placed(
        kv=reports.kv_by_device(TWO_GPUS_CONTEXT),
        compute=reports.compute_by_device(TWO_GPUS_CONTEXT),
    )
    assert rows[1] == PlacedOut(device="CUDA0", kv_bytes=448 * MIB, compute_bytes=560 * MIB)
    assert [row.device for row in rows] == ["CPU", "CUDA0", "CUDA1"]


def test_recurrent_states_count_with_the_kv_of_their_device() -> None:
    assert reports.kv_by_device(HYBRID_CONTEXT) == {"CPU": mib(1.5), "CUDA0": mib(97.88)}
    assert reports.kv_reported(HYBRID_CONTEXT).bytes == mib(99.38)
    assert reports.kv_summarised(HYBRID_CONTEXT).bytes == mib(99.38)


def test_a_dry_runs_summaries_tell_what_its_buffer_lines_do_not() -> None:
    assert reports.kv_reported(WINDOWED_DRY_RUN).bytes == 0
    assert reports.kv_summarised(WINDOWED_DRY_RUN) == reports.Reported(mib(370.01), 2)


@pytest.mark.parametrize(
    ("buffer_type", "device"),
    [
        ("CPU", "CPU"),
        ("CPU_REPACK", "CPU"),
        ("Vulkan_Host", "CPU"),
        ("Vulkan1", "Vulkan1"),
        ("CUDA12", "CUDA12"),
        ("MTL0_Private", "MTL0"),
    ],
)
def test_a_buffer_types_name_tells_whose_memory_it_is(buffer_type: str, device: str) -> None:
    assert reports.device_of(buffer_type) == device


def test_planned_bytes_stand_only_where_the_report_could_have_been_printed_from_them() -> None:
    reported = reports.kv_summarised(WINDOWED_DRY_RUN)
    near, far = mib(370.01) + 9000, mib(370.01) + 12000
    assert reports.settled_kv_bytes(near, reported) == near
    assert reports.settled_kv_bytes(far, reported) == reported.at_most
    assert reports.settled_kv_bytes(0, reported) == reported.at_most
    assert mib(370.01) < reported.at_most <= mib(370.02)


def test_the_split_adds_up_to_the_settled_total() -> None:
    split = {"CPU": 10, "CUDA0": 1000}
    assert reports.scaled_to(1007, split) == {"CPU": 10, "CUDA0": 997}
    assert reports.scaled_to(5, {}) == {"CPU": 5}
    assert reports.scaled_to(0, {}) == {}


@pytest.mark.parametrize(
    "words",
    [
        "llama_model_load: error loading model: std::bad_alloc",
        "ggml_backend_cpu_buffer_type_alloc_buffer: failed to allocate buffer of size 1073741824",
        "allocating 4096.00 MiB on device 0: cudaMalloc failed: out of memory",
        "llama_model_load: error loading model: unable to allocate CUDA0 buffer",
    ],
)
def test_the_engines_words_for_a_failed_allocation_are_understood(words: str) -> None:
    assert reports.lacks_memory(words)
    assert not reports.lacks_memory("error loading model: unknown model architecture: 'zork'")


# --- what the engine is told -------------------------------------------------------------------

GPUS = {"CUDA0": 0x1000, "CUDA1": 0x2000, "CUDA2": 0x3000}


def pointers(struct: object) -> list[int | None]:
    array = ctypes.cast(struct.devices, ctypes.POINTER(ctypes.c_void_p))  # type: ignore[attr-defined]
    found: list[int | None] = []
    while not found or found[-1]:
        found.append(array[len(found)])
    return found


def test_named_devices_and_their_shares_reach_the_engines_struct() -> None:
    made = parameters.model_parameters(30, ["CUDA2", "CUDA0"], [3.0, 1.0], GPUS)
    struct = made.struct
    assert struct.n_gpu_layers == 30
    assert (struct.split_mode, struct.main_gpu) == (llama.LLAMA_SPLIT_MODE_LAYER, 0)
    assert not struct.use_extra_bufts
    assert pointers(struct) == [0x3000, 0x1000, None]
    shares = [struct.tensor_split[index] for index in range(llama.llama_max_devices())]
    assert shares == [3.0, 1.0, *[0.0] * (llama.llama_max_devices() - 2)]


def test_without_layers_to_offload_the_device_list_is_there_and_empty() -> None:
    for named, split in (((), ()), (("CUDA0",), (1.0,))):
        made = parameters.model_parameters(0, named, split, GPUS)
        assert made.struct.devices  # none given would let the engine take all of them
        assert pointers(made.struct) == [None]
        assert not made.struct.tensor_split


def test_layers_without_a_named_device_leave_the_choice_to_the_engine() -> None:
    made = parameters.model_parameters(5, (), (), GPUS)
    assert made.struct.devices is None
    assert made.struct.n_gpu_layers == 5


@pytest.mark.parametrize(
    ("named", "split", "field"),
    [
        (["CUDA7"], [], "devices"),
        (["CPU"], [], "devices"),
        (["CUDA0", "CUDA0"], [], "devices"),
        (["CUDA0", "CUDA1"], [1.0], "tensor_split"),
        ([], [1.0], "tensor_split"),
        (["CUDA0", "CUDA1"], [0.0, 0.0], "tensor_split"),
        (["CUDA0", "CUDA1"], [-1.0, 2.0], "tensor_split"),
        (["CUDA0", "CUDA1"], [float("nan"), 2.0], "tensor_split"),
    ],
)
def test_a_placement_that_cannot_be_is_refused(
    named: list[str], split: list[float], field: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parameters.model_parameters(3, named, split, GPUS)
    assert refused.value.metadata["field"] == field
    if field == "devices":
        assert "CUDA0, CUDA1, CUDA2" in refused.value.metadata["allowed"]


def test_context_settings_round_up_and_never_exceed_the_window() -> None:
    made = parameters.context_settings(
        300,
        n_batch=2048,
        n_ubatch=1024,
        k_type="q8_0",
        v_type="f16",
        threads=3,
        flash_attn=False,
        offload=False,
    )
    assert (made.window, made.n_batch, made.n_ubatch) == (512, 512, 512)
    struct = parameters.context_parameters(made)
    assert (struct.n_ctx, struct.n_seq_max, struct.n_outputs_max) == (512, 2, 2)
    assert (struct.type_k, struct.type_v, struct.n_threads) == (8, 1, 3)
    assert not struct.offload_kqv
    assert not struct.op_offload


# --- the host's part ---------------------------------------------------------------------------

FACTS = ModelFacts(
    architecture="a",
    name="n",
    layers=(LayerFacts(2, 2, 8, 8), LayerFacts(2, 4, 8, 8, 128)),
    embedding_length=64,
    heads=4,
    model_max=1024,
    vocabulary=100,
    weights_bytes=1000,
    file_bytes=1100,
    quantization="F16",
    layer_weights=(100, 110, 120, 130),
    input_bytes=300,
    output_bytes=240,
)


@pytest.mark.parametrize(
    ("gpu_layers", "counts", "weights"),
    [
        (0, [2, 2], 1000),
        (1, [2, 2], 760),  # the output goes first
        (3, [2], 510),
        (4, [1], 400),
        (5, [], 300),  # the input stays
        (99, [], 300),
    ],
)
def test_accelerators_take_the_last_layers_and_the_output_first(
    gpu_layers: int, counts: list[int], weights: int
) -> None:
    assert [run.count for run in host.on_host(FACTS, gpu_layers).layers] == counts
    assert host.host_weights(FACTS, gpu_layers) == weights


# --- on the real engine ------------------------------------------------------------------------


def load_op(path: Path, **more: object) -> LoadOp:
    return LoadOp(path=str(path), model="m", digest="", threads=1, **more)  # type: ignore[arg-type]


def load(engine: LlamaEngine, path: Path, **more: object) -> LoadResult:
    return engine.load(load_op(path, **more), lambda stage, fraction: None, lambda: False)


@pytest.fixture
def engine() -> Iterator[LlamaEngine]:
    made = LlamaEngine()
    yield made
    made.unload()


def test_the_engine_names_its_devices_and_the_host_is_one() -> None:
    told = LlamaEngine().hello().devices
    cpu = next(device for device in told if device.name == "CPU")
    assert cpu.kind == "cpu"
    assert cpu.description
    assert cpu.total_bytes > MIB
    accelerators = [device.name for device in told if device.kind in devices.ACCELERATORS]
    assert list(devices.accelerators()) == accelerators
    assert bool(accelerators) == bool(llama.llama_supports_gpu_offload())


def test_a_load_reports_traits_and_where_the_weights_went(
    engine: LlamaEngine, tmp_path: Path
) -> None:
    result = load(engine, tiny_models.gemma3(tmp_path / "m.gguf", window=128))
    assert result.traits["layers"] == 6
    assert result.traits["sliding_window"] == 128
    assert result.traits["train_context"] == tiny_models.CONTEXT
    assert result.traits["embedding_length"] == 64
    assert (result.traits["heads"], result.traits["kv_heads"]) == (4, 1)
    assert result.traits["vocabulary"] == result.vocab
    assert (result.traits["recurrent"], result.traits["hybrid"]) == (0, 0)
    assert result.gpu_layers == 0
    (row,) = result.placed
    assert row.device == "CPU"
    assert abs(row.weights_bytes - result.weights_bytes) < 0.05 * MIB


def test_a_recurrent_model_is_known_as_one(engine: LlamaEngine, tmp_path: Path) -> None:
    assert load(engine, tiny_models.mamba(tmp_path / "m.gguf")).traits["recurrent"] == 1


def test_a_context_reports_its_bytes_by_device(engine: LlamaEngine, tmp_path: Path) -> None:
    load(engine, tiny_models.llama(tmp_path / "m.gguf"))
    context = engine.new_context(512, "f16", "f16")
    assert context.placed == [
        PlacedOut(device="CPU", kv_bytes=context.kv_bytes, compute_bytes=context.compute_bytes)
    ]
    assert context.kv_bytes == 2 * 512 * 2 * (16 + 16) * 2


def test_layers_for_a_gpu_are_refused_where_the_build_has_none(
    engine: LlamaEngine, tmp_path: Path
) -> None:
    assert not llama.llama_supports_gpu_offload(), "this build has a GPU: write that test"
    with pytest.raises(InvalidRequest, match="has no GPU") as refused:
        load(engine, tiny_models.llama(tmp_path / "m.gguf"), n_gpu_layers=2)
    assert refused.value.metadata["field"] == "n_gpu_layers"


def test_a_device_that_is_not_there_is_refused_and_the_answer_names_what_is(
    engine: LlamaEngine, tmp_path: Path
) -> None:
    with pytest.raises(InvalidRequest, match="finds no accelerator") as refused:
        load(engine, tiny_models.llama(tmp_path / "m.gguf"), devices=["CUDA0"])
    assert refused.value.metadata["field"] == "devices"


# --- guarded allocations, for real -------------------------------------------------------------


class Free:
    """A reading that a test sets: bytes that are free on this machine."""

    def __init__(self) -> None:
        self.bytes = 8 * 1024 * MIB

    def __call__(self) -> MemorySnapshot:
        return MemorySnapshot(total_bytes=64 * 1024 * MIB, available_bytes=self.bytes)


@pytest.fixture
def free() -> Free:
    return Free()


@pytest.fixture
def guarded(free: Free) -> Iterator[LlamaEngine]:
    made = LlamaEngine(MemoryGuard(free, slack_bytes=0))
    yield made
    made.unload()


def test_a_model_larger_than_free_memory_is_refused_before_the_engine_sees_it(
    guarded: LlamaEngine, free: Free, tmp_path: Path
) -> None:
    path = tiny_models.llama(tmp_path / "m.gguf")
    free.bytes = 100_000
    with pytest.raises(InsufficientMemory) as refused:
        load(guarded, path)
    told = refused.value.metadata
    assert told["free_bytes"] == "100000"
    assert int(told["weights_bytes"]) > 100_000
    with pytest.raises(ModelNotActive):
        _ = guarded.tokenizer


@pytest.mark.real
def test_a_context_too_large_for_what_is_free_fails_typed_and_the_worker_goes_on(
    guarded: LlamaEngine, free: Free, demo_model: Path
) -> None:
    core = SessionCore(guarded)

    def opened(name: str, window: int, compute_bytes: int = 0) -> OpenResult:
        result = core.handle(
            OpenOp(
                session_id=name,
                prompt_format="raw",
                window=window,
                k_type="f16",
                v_type="f16",
                kv_digest="",
                runtime_digest="",
                compute_bytes=compute_bytes,
            ),
            FakeOp(),
        )
        assert isinstance(result, OpenResult)
        return result

    core.handle(load_op(demo_model), FakeOp())
    need = opened("measured", 8192)
    before = len(need.placed)
    # Known beforehand: neither the plan's bytes nor an estimate of the engine's buffers fit.
    free.bytes = need.kv_bytes + need.compute_bytes // 2
    for planned in (need.compute_bytes, 0):
        with pytest.raises(InsufficientMemory) as refused:
            opened("refused", 8192, planned)
        told = refused.value.metadata
        assert told["cause"] == "host_memory"
        assert told["kv_bytes"] == str(need.kv_bytes)
        assert told["free_bytes"] == str(free.bytes)
        assert int(told["needed_bytes"]) > free.bytes
    # Planned too low: the engine's own allocation fails, first of its buffers, then of the KV.
    for room in (need.kv_bytes + need.compute_bytes // 2, need.kv_bytes + 1):
        free.bytes = room
        with pytest.raises(InsufficientMemory, match=r"It said: .*alloc") as refused:
            opened("failed", 8192, 1)
        assert refused.value.metadata["cause"] == "engine"
    assert opened("small", 256, 1).window == 256
    free.bytes = 8 * 1024 * MIB
    assert opened("again", 8192).kv_bytes == need.kv_bytes
    assert before == 1
    core.close()


@pytest.mark.real
def test_the_probe_of_a_real_model_is_the_same_twice_and_makes_sense(
    engine: LlamaEngine, demo_model: Path
) -> None:
    core = SessionCore(engine)
    results = []
    for _ in range(2):
        result = core.handle(load_op(demo_model, quality=True), FakeOp())
        assert isinstance(result, LoadResult)
        assert result.quality is not None
        results.append(result.quality)
    first, again = results
    assert (first.ids, first.margins) == (again.ids, again.margins)
    text = b"".join(map(engine.tokenizer.piece, first.ids)).decode()
    assert text.isascii()
    assert len(text.split()) > 10
    assert all(margin >= 0 for margin in first.margins)
    core.close()
