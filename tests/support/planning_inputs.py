"""Models, machines and uses for tests of the capacity planner: by hand, and as strategies."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from modeld.shared.capacity import (
    CapacityPolicy,
    CapacityRequest,
    Companions,
    DeviceKind,
    DeviceReading,
    LayerFacts,
    LayerKind,
    MachineReading,
    MemorySnapshot,
    ModelFacts,
    PlacedUse,
    Placement,
    SlotUse,
)

MIB = 1 << 20
GIB = 1 << 30


def model(
    layers: tuple[LayerFacts, ...] = (LayerFacts(32, 8, 128, 128),),
    *,
    layer_bytes: int = 128 * MIB,
    embedding_bytes: int = 256 * MIB,
    output_bytes: int = 400 * MIB,
    tied: bool = False,
    name: str = "model",
    model_max: int = 131072,
) -> ModelFacts:
    """A model of eight thousand million parameters, if nothing else is said."""
    blocks = sum(run.count for run in layers)
    weights = blocks * layer_bytes + embedding_bytes + output_bytes
    return ModelFacts(
        architecture="llama",
        name=name,
        layers=layers,
        embedding_length=4096,
        heads=32,
        model_max=model_max,
        vocabulary=128256,
        weights_bytes=weights,
        file_bytes=weights,
        quantization="Q4_K",
        feed_forward_length=14336,
        layer_weights=(layer_bytes,) * blocks,
        input_bytes=embedding_bytes,
        output_bytes=output_bytes,
        tied_output=tied,
    )


def device(
    free: int, *, number: int = 0, total: int = 0, engine_name: str | None = None
) -> DeviceReading:
    return DeviceReading(
        id=f"GPU-{number}",
        name="a card",
        kind=DeviceKind.NVIDIA,
        total_bytes=total or max(free, GIB),
        free_bytes=free,
        engine_name=f"CUDA{number}" if engine_name is None else engine_name,
    )


def machine(*free: int, host: int = 64 * GIB) -> MachineReading:
    """A host and accelerators of which so much is free."""
    devices = tuple(device(bytes_, number=number) for number, bytes_ in enumerate(free))
    return MachineReading(MemorySnapshot(max(host, GIB), host), devices)


# --- strategies ----------------------------------------------------------------------------------

lengths = st.sampled_from([32, 64, 128])
runs = st.one_of(
    st.builds(
        LayerFacts,
        count=st.integers(1, 24),
        kv_heads=st.integers(1, 8),
        key_length=lengths,
        value_length=lengths,
        window_cells=st.sampled_from([0, 0, 512, 1000]),
    ),
    st.builds(
        LayerFacts,
        count=st.integers(1, 12),
        kv_heads=st.just(0),
        key_length=st.just(0),
        value_length=st.just(0),
        kind=st.sampled_from([LayerKind.RECURRENT, LayerKind.NONE]),
        state_bytes=st.integers(0, 4 * MIB),
    ),
    st.builds(
        LayerFacts,
        count=st.integers(1, 12),
        kv_heads=st.integers(1, 4),
        key_length=lengths,
        value_length=lengths,
        kind=st.sampled_from([LayerKind.MIXED, LayerKind.SHARED]),
        state_bytes=st.integers(0, 4 * MIB),
    ),
    st.builds(
        LayerFacts,
        count=st.integers(1, 24),
        kv_heads=st.just(1),
        key_length=st.just(576),
        value_length=st.just(512),
        kind=st.just(LayerKind.LATENT),
    ),
)


@st.composite
def models(draw: st.DrawFn) -> ModelFacts:
    layers = tuple(draw(st.lists(runs, min_size=1, max_size=4)))
    blocks = sum(run.count for run in layers)
    each = [draw(st.integers(0, 200 * MIB)) // draw(st.sampled_from([1, 4, 16]))] * (blocks - 1)
    each.append(draw(st.integers(0, 100 * MIB)))
    known = draw(st.sampled_from([True, True, True, False]))
    embedding, output = draw(st.integers(0, 512 * MIB)), draw(st.integers(0, 512 * MIB))
    weights = sum(each) + embedding + output
    return replace(
        model(layers),
        heads=draw(st.sampled_from([0, 4, 32])),
        embedding_length=draw(st.sampled_from([64, 576, 4096])),
        vocabulary=draw(st.sampled_from([1000, 128256])),
        feed_forward_length=draw(st.sampled_from([0, 1536, 14336])),
        model_max=draw(st.sampled_from([0, 1000, 8192, 131072])),
        weights_bytes=weights,
        layer_weights=tuple(each) if known else (),
        input_bytes=embedding,
        output_bytes=output,
        tied_output=draw(st.booleans()),
        unknown_pattern=draw(st.sampled_from([False, False, True])),
        widest_value=draw(st.sampled_from([0, 0, 2048])),
        experts_used=draw(st.sampled_from([0, 8])),
        expert_feed_forward_length=draw(st.sampled_from([0, 768])),
    )


def readings(most: int = 4) -> st.SearchStrategy[MachineReading]:
    def build(host: int, free: list[int], usable: list[bool], known: bool) -> MachineReading:
        devices = tuple(
            device(bytes_, number=number, total=24 * GIB, engine_name=None if use else "")
            for number, (bytes_, use) in enumerate(zip(free, usable, strict=False))
        )
        return MachineReading(MemorySnapshot(64 * GIB, host, known=known), devices)

    return st.builds(
        build,
        # Mostly a host that isn't what is short.
        st.one_of(st.integers(0, 8 * GIB), *[st.integers(24 * GIB, 64 * GIB)] * 3),
        st.lists(
            st.builds(
                lambda gibs, more: gibs * GIB + more,
                st.sampled_from([0, 2, 6, 12, 20, 20]),
                st.integers(0, GIB),
            ),
            max_size=most,
        ),
        st.lists(st.sampled_from([True, True, True, False]), min_size=most, max_size=most),
        st.sampled_from([True, True, True, True, False]),
    )


policies = st.builds(
    CapacityPolicy,
    reserve_bytes=st.sampled_from([0, MIB, GIB]),
    user_limit_bytes=st.sampled_from([0, 0, 0, 0, 2 * GIB, 32 * GIB]),
    max_window=st.sampled_from([0, 0, 1500, 16384]),
    floor_window=st.sampled_from([1, 256, 4096]),
    headroom=st.sampled_from([0.0, 0.02, 0.2]),
    sessions_share=st.integers(1, 6),
    max_sessions=st.integers(1, 10),
    n_ubatch=st.sampled_from([64, 256, 512]),
    flash_attn=st.booleans(),
    placement=st.sampled_from(Placement),
    gpu_layers=st.sampled_from([-1] * 6 + [0, 7, 999]),
    tensor_split=st.sampled_from([(), (), (), (), (3.0, 1.0), (0.0, 1.0, 1.0)]),
    device_reserve_bytes=st.sampled_from([0, MIB]),
    device_limit_bytes=st.sampled_from([0, 0, 0, 4 * GIB]),
    cold_budget_bytes=st.sampled_from([0, 0, GIB]),
)
requests = st.builds(
    CapacityRequest,
    window=st.one_of(st.just(0), st.integers(1, 10_000), st.integers(1, 200_000)),
    k_type=st.sampled_from(["f16", "f32", "q8_0"]),
    v_type=st.sampled_from(["f16", "q8_0", "q4_0"]),
    sessions=st.sampled_from([0, 0, 0, 1, 3]),
)


def typed(facts: ModelFacts, request: CapacityRequest) -> CapacityRequest:
    """With one type for keys and values where the model keeps both as one row."""
    if any(layer.kind is LayerKind.LATENT for layer in facts.layers):
        return replace(request, v_type=request.k_type)
    return request


companions = st.builds(
    Companions,
    projector_bytes=st.sampled_from([0, 0, GIB]),
    projector_compute_bytes=st.sampled_from([0, 100 * MIB]),
    adapter_bytes=st.sampled_from([0, 0, 64 * MIB]),
    draft_bytes=st.sampled_from([0, 0, 500 * MIB]),
)


@st.composite
def uses(draw: st.DrawFn) -> SlotUse:
    cells = draw(st.integers(0, 20_000))
    reclaimable = draw(st.integers(0, cells))
    per_cell = draw(st.sampled_from([0, 1000, 50_000]))
    there = draw(st.integers(0, 3))
    return SlotUse(
        weights_resident=draw(st.booleans()),
        cells=cells,
        resident_bytes=cells * per_cell,
        reclaimable_bytes=reclaimable * per_cell,
        sessions=draw(st.integers(0, 4)),
        reclaimable_cells=draw(st.sampled_from([0, reclaimable])),
        gpu_layers=draw(st.sampled_from([-1] * 8 + [0, 5])),
        tensor_split=draw(st.sampled_from([(), (1.0,), (2.0, 3.0)])),
        on_devices=tuple(
            PlacedUse(
                f"GPU-{i}", draw(st.integers(0, GIB)), cells * per_cell, reclaimable * per_cell
            )
            for i in range(there)
        ),
    )
