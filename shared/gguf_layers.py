"""What each layer of a GGUF model keeps of its tokens: the file's settings by the engine's rules.

Follows llama.cpp's loaders and caches as ``gguf_types`` lists them; reads no file, and knows
nothing of budgets. Numbers that the engine could not hold are refused here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from modeld.shared.capacity import LayerFacts, LayerKind
from modeld.shared.gguf_parse import MAX_COUNT, refuse
from modeld.shared.gguf_types import (
    INDEXED,
    LATENT,
    LAYERS_WITH_OWN_KV,
    MEMORYLESS,
    RECURRENT,
    WINDOWS,
    RecurrentFamily,
    WindowFamily,
)

if TYPE_CHECKING:
    from modeld.shared.gguf_header import GgufHeader

MAX_LAYERS = 512  # llama.cpp's LLAMA_MAX_LAYERS, an assertion there
_STATE_BYTES = 4  # recurrent states are F32, whatever the cache types (llama_model::create_memory)
_NOTHING = LayerFacts(1, 0, 0, 0, kind=LayerKind.NONE)
_SHARED = LayerFacts(1, 0, 0, 0, kind=LayerKind.SHARED)
_CSA_RATIO, _HCA_RATIO = 4, 128  # tokens a compressed row (llama-kv-cache-dsv4.cpp)


class Windows(NamedTuple):
    """Which layers attend a window only, of how many tokens, and where that is known from."""

    layers: tuple[bool, ...]
    tokens: int = 0
    source: str = ""
    unknown: bool = False  # a window is declared, and no rule says for which layers


class Layers(NamedTuple):
    """Every layer in order, each with ``count`` 1, and what holds for all of them."""

    layers: tuple[LayerFacts, ...]
    windows: Windows
    widest_value: int = 0  # elements a token; 0: all alike


def read_layers(header: GgufHeader) -> Layers:
    """The layers that the engine sees. Raises ModelLoadFailed for numbers that can't be."""
    windows = read_windows(header)
    if header.architecture == "deepseek4":
        return Layers(_compressed_layers(header), windows._replace(unknown=True))
    shape = _Shape(header, windows)
    own = [shape.layer(block) for block in range(header.block_count)]
    widest = shape.widest_value(own)
    layers = [shape.with_indexer(block, layer) for block, layer in enumerate(own)]
    if header.architecture == "nanbeige":  # models/nanbeige.cpp: blocks run again, with own KV
        layers *= header.count("num_loops", 1)
    if header.architecture == "graniteswitch":  # models/granite-switch.cpp: one head routes
        layers.append(LayerFacts(1, 1, shape.key_length, shape.value_length))
        widest = max(own_row(layer)[1] for layer in layers) if shape.value_varies(layers) else 0
    if len(layers) > MAX_LAYERS:
        raise refuse(f"it has {len(layers)} layers, more than {MAX_LAYERS}")
    _check_sizes(layers, widest, header.context_length)
    return Layers(tuple(layers), windows, widest)


def own_row(layer: LayerFacts) -> tuple[int, int]:
    """Elements that a token's keys and values take in a layer."""
    return layer.kv_heads * layer.key_length, layer.kv_heads * layer.value_length


def _check_sizes(layers: list[LayerFacts], widest: int, tokens: int) -> None:
    """Refuse what a byte count of 63 bits or the engine's row length of 32 bits can't hold."""
    total = 0
    for layer in layers:
        rows = own_row(layer)
        if max(rows) > MAX_COUNT:
            raise refuse(
                f"a layer's row of {layer.kv_heads} heads of {layer.key_length} and "
                f"{layer.value_length} elements is longer than {MAX_COUNT}"
            )
        total += rows[0] + max(rows[1], widest) + layer.state_bytes
    if total * 4 * max(tokens, 1) >= 2**63:
        raise refuse(f"KV of {tokens} tokens would take more than 2^63 bytes")


def read_windows(header: GgufHeader) -> Windows:
    """Which layers the engine gives a window. A window without a known pattern is ``unknown``."""
    count = header.block_count
    everything = (False,) * count
    family = WINDOWS.get(header.architecture)
    declared = header.count("attention.sliding_window")
    if family is None:
        return Windows(everything, declared, unknown=declared > 0)
    tokens = _window_tokens(header, family, declared)
    if not tokens or (family.blocks and count - _predicting(header) != family.blocks):
        return Windows(everything, source=family.source if declared else "")
    if family.period == 1:
        return Windows(everything, source=family.source)
    if family.all_attention:
        return Windows(tuple(kv > 0 for kv in header.head_count_kv), tokens, family.source)
    key = header.own("attention.sliding_window_pattern")
    if key in header.arrays:
        listed = [bool(value) for value in header.numbers(key)][:count]
        padded = (*listed, *everything[len(listed) :])  # the engine leaves the rest unwindowed
        return Windows(padded, tokens, f"{key} in the file")
    if not family.scalar and not family.period:
        return Windows(everything, tokens, unknown=True)
    period = header.count("attention.sliding_window_pattern", family.period)
    trunk = count - _predicting(header)
    layers = tuple(_in_window(layer, period, family) and layer < trunk for layer in range(count))
    return Windows(
        layers, tokens, f"{key} in the file" if key in header.metadata else family.source
    )


def _in_window(layer: int, period: int, family: WindowFamily) -> bool:
    """llama_hparams::set_swa_pattern."""
    if period == 0:
        return True
    return layer % period != 0 if family.dense_first else layer % period < period - 1


def _window_tokens(header: GgufHeader, family: WindowFamily, declared: int) -> int:
    if header.own("attention.sliding_window") in header.metadata:
        return family.fixed_window or declared if declared else 0
    return family.default_window


def _predicting(header: GgufHeader) -> int:
    """Blocks at the end that predict further tokens (MTP)."""
    count = header.count("nextn_predict_layers")
    if count > header.block_count:
        raise refuse(f"{count} of its {header.block_count} blocks predict further tokens")
    return count


class _Shape:
    """The settings that decide what a layer keeps."""

    def __init__(self, header: GgufHeader, windows: Windows) -> None:
        self._header, self._windows = header, windows
        self._architecture = header.architecture
        self._kv_heads = header.head_count_kv
        self.key_length, self.value_length = header.key_length, header.value_length
        self._windowed_key = header.count("attention.key_length_swa", self.key_length)
        self._windowed_value = header.count("attention.value_length_swa", self.value_length)
        self._trunk = header.block_count - _predicting(header)
        mla = [header.count(f"attention.{name}_length_mla") for name in ("key", "value")]
        self._latent = self._architecture in LATENT and all(mla)
        self._family = RECURRENT.get(self._architecture)
        self._feed_forward = header.feed_forward_lengths
        self._recurrent = _recurrent_layers(header, self._family, self._trunk)
        self._state_bytes = state_bytes(header, self._family) if any(self._recurrent) else 0
        self._own_kv = _layers_with_own_kv(header)

    def layer(self, block: int) -> LayerFacts:
        """What the block keeps in the main context, without an indexer's keys."""
        if self._architecture in MEMORYLESS:
            return _NOTHING
        if block >= self._own_kv:
            return _SHARED
        recurrent = self._recurrent[block] and block < self._trunk
        if not self._keeps_kv(block):
            if not recurrent:
                return _NOTHING
            return LayerFacts(1, 0, 0, 0, 0, LayerKind.RECURRENT, self._state(block))
        windowed = self._windows.layers[block]
        key = self._windowed_key if windowed else self.key_length
        value = self._windowed_value if windowed else self.value_length
        window = self._windows.tokens if windowed else 0
        heads = self._kv_heads[block]
        if recurrent:
            return LayerFacts(1, heads, key, value, window, LayerKind.MIXED, self._state(block))
        if self._latent:
            return LayerFacts(1, heads, key, 0, window, LayerKind.LATENT)
        kind = LayerKind.WINDOW if windowed else LayerKind.FULL
        return LayerFacts(1, heads, key, value, window, kind)

    def _keeps_kv(self, block: int) -> bool:
        """The layer filters of llama_model::create_memory."""
        if self._family is None:
            # Without a trunk, a file is all draft head, and nothing is filtered.
            filtered = self._trunk > 0 and self._architecture not in ("hy_v4", "minimax-m3")
            return block < self._trunk or not filtered
        if self._family.layers == "both":
            return True
        if self._family.layers == "all" or self._recurrent[block]:
            return False
        if self._family.layers == "nemotron":
            return self._feed_forward[block] == 0
        return block < self._trunk or not self._family.trunk_only

    def _state(self, block: int) -> int:
        extra = 0
        if self._architecture == "qwen4exp" and block in self._header.numbers(
            self._header.own("ple.layers")
        ):  # llama_hparams::ple_conv_state
            count = self._header.count
            rows = max(count("ple.conv_kernel") - 1, 0) * count("ple.ngram_size")
            extra = rows * count("hyper_connection.count") * self._header.embedding_length
        return self._state_bytes + _STATE_BYTES * extra

    def value_varies(self, layers: list[LayerFacts]) -> bool:
        """Whether layers with a cache of values differ in its width."""
        kept = {own_row(layer)[1] for layer in layers if _caches_values(layer)}
        return len(kept) > 1

    def widest_value(self, layers: list[LayerFacts]) -> int:
        """llama_hparams::n_embd_v_gqa_max if it is more than some layer's own; else 0.

        The engine takes the most of all layers, those without a cache included.
        """
        widest = max(
            (
                heads * (self._windowed_value if windowed else self.value_length)
                for heads, windowed in zip(self._kv_heads, self._windows.layers, strict=True)
            ),
            default=0,
        )
        kept = [own_row(layer)[1] for layer in layers if _caches_values(layer)]
        return widest if any(width != widest for width in kept) else 0

    def with_indexer(self, block: int, layer: LayerFacts) -> LayerFacts:
        """The layer with its indexer's row beside its own, written as one head where needed."""
        if self._architecture not in INDEXED or not self._indexed(block, layer):
            return layer
        key, value = own_row(layer)
        key += self._header.count("attention.indexer.key_length") * (
            3 if self._architecture == "glm5-next" else 1  # keys, gates and pooled values
        )
        if not self._latent and self._architecture != "qwen4exp":
            value += layer.value_length  # its cache has a V beside the keys
        return replace(layer, kv_heads=1, key_length=key, value_length=value)

    def _indexed(self, block: int, layer: LayerFacts) -> bool:
        count, architecture = self._header.count, self._architecture
        if layer.kind in (LayerKind.NONE, LayerKind.RECURRENT, LayerKind.SHARED):
            return False
        if architecture == "minimax-m3":
            return block >= count("leading_dense_block_count")
        if block >= self._trunk or (
            architecture == "hy_v4" and not count("attention.indexer.top_k")
        ):
            return False
        key = self._header.own("attention.indexer.types")
        if architecture in ("deepseek32", "qwen4exp") or key not in self._header.arrays:
            return True  # glm-dsa has a list of its own in the engine: all is the most it can be
        types = self._header.numbers(key)
        return block < len(types) and bool(types[block])


def _caches_values(layer: LayerFacts) -> bool:
    return layer.kind in (LayerKind.FULL, LayerKind.WINDOW, LayerKind.MIXED)


def _layers_with_own_kv(header: GgufHeader) -> int:
    if header.architecture == "gemma4-assistant":
        return 0  # it attends another model's cache
    if header.architecture != "gemma4":
        return LAYERS_WITH_OWN_KV.get(header.architecture, header.block_count)
    shared = header.count("attention.shared_kv_layers")
    if header.block_count and header.block_count - shared < 2:
        raise refuse(
            f"{shared} of its {header.block_count} blocks share another's KV, "
            "and at least two must have their own"
        )
    return header.block_count - shared


def _recurrent_layers(
    header: GgufHeader, family: RecurrentFamily | None, trunk: int
) -> tuple[bool, ...]:
    """llama_hparams::is_recr of each block."""
    blocks = range(header.block_count)
    if family is None:
        return (False,) * len(blocks)
    no_kv = tuple(block < trunk and heads == 0 for block, heads in enumerate(header.head_count_kv))
    match family.layers:
        case "all" | "both":
            return (True,) * len(blocks)
        case "kv0":
            return no_kv
        case "nemotron":
            lengths = header.feed_forward_lengths
            return tuple(no_kv[block] and lengths[block] == 0 for block in blocks)
    listed = header.own("attention.recurrent_layers")
    if listed in header.metadata or listed in header.arrays:
        return tuple(bool(value) for value in header.per_layer(listed, 0))
    interval = header.count("full_attention_interval", family.interval)
    if interval == 0:
        raise refuse("its full_attention_interval is 0")
    return tuple(block < trunk and (block + 1) % interval != 0 for block in blocks)


def state_bytes(header: GgufHeader, family: RecurrentFamily | None) -> int:
    """Bytes of one layer's state for one sequence: llama_hparams::n_embd_r and n_embd_s, as F32."""
    if family is None:
        return 0
    count, width = header.count, header.embedding_length
    heads = header.head_counts[0] if header.head_counts else 0
    match family.state:
        case "wkv":
            elements = width * (count("token_shift_count", 2) + count("wkv.head_size"))
        case "shortconv":
            elements = width * max(count("shortconv.l_cache") - 1, 0)
        case "kda":
            head = count("kda.head_dim")
            kernel = count("ssm.conv_kernel")
            elements = 3 * (kernel - 1 if kernel else 3) * heads * head + head * head * heads
        case "linear":
            elements = header.key_length * header.key_length * heads
        case _:
            inner, state = count("ssm.inner_size"), count("ssm.state_size")
            groups = count("ssm.group_count") if family.state == "ssm" else 0
            kernel = max(count("ssm.conv_kernel") - 1, 0)
            elements = kernel * (inner + 2 * groups * state) + state * inner
    if elements > MAX_COUNT:
        raise refuse(f"a layer's recurrent state of {elements} elements is more than {MAX_COUNT}")
    return _STATE_BYTES * elements


def _compressed_layers(header: GgufHeader) -> tuple[LayerFacts, ...]:
    """deepseek4, as the most that it can take: its compressed caches have fewer cells than tokens,
    which a layer's facts can't say (llama-kv-cache-dsv4.cpp).
    """
    key = header.own("attention.compress_ratios")
    ratios = header.numbers(key)
    if len(ratios) < header.block_count:
        raise refuse(f"{key!r} has {len(ratios)} elements for {header.block_count} blocks")
    index = header.count("attention.indexer.key_length")
    head = header.key_length
    layers = []
    for heads, ratio in zip(header.head_count_kv, ratios, strict=False):
        row, state = heads * head, 0
        if ratio == _CSA_RATIO:
            row, state = 2 * row + index, 2 * _CSA_RATIO * 2 * (head + index)
        elif ratio == _HCA_RATIO:
            row, state = 2 * row, _HCA_RATIO * head
        layers.append(LayerFacts(1, 1, row, 0, 0, LayerKind.MIXED, 2 * _STATE_BYTES * state))
    _check_sizes(layers, 0, header.context_length)
    return tuple(layers)
