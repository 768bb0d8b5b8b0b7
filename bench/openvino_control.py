"""OpenVINO without the product around it: the paged executor's loop, and GenAI's own pipeline.

Both compute in the same precision, with the same KV type, threads and chunk of a prefill.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from bench.control import EngineSettings, Kind
from modeld.shared.messages import LoadOp

now = time.perf_counter
CHUNK = 256  # tokens that one inference of a prefill takes


class Paged:
    """The worker's engine class, with the checks that it makes at every call, and an argmax."""

    def __init__(self, settings: EngineSettings) -> None:
        from modeld.workers.openvino.engine import OpenVinoEngine

        self._engine = OpenVinoEngine()
        request = LoadOp(
            path=settings.model,
            model="bench",
            digest="",
            n_batch=settings.n_batch,
            n_ubatch=CHUNK,
            threads=settings.threads,
        )
        self._engine.load(request, lambda stage, fraction: None, lambda: False)
        self._context = self._engine.new_context(settings.window, "f16", "f16")
        self._held: list[int] = []

    def decode(
        self, prefix: list[int], suffix: list[int], tokens: int, texts: list[str]
    ) -> dict[str, Any]:
        if self._held != prefix:
            self._context.trim(0)
            self._context.evaluate(prefix, 0, cancelled=lambda: False)
            self._held = list(prefix)
        length = len(prefix)
        self._context.trim(length)
        began_s = now()
        self._context.evaluate(suffix, length, cancelled=lambda: False)
        length += len(suffix)
        ids = [int(self._context.logits().argmax())]
        first_s = now()
        for _ in range(tokens - 1):
            self._context.step(ids[-1], length)
            length += 1
            ids.append(int(self._context.logits().argmax()))
        return {"ids": ids, "first_s": first_s - began_s, "rest_s": now() - first_s}

    def prefill(self, ids: list[int]) -> dict[str, Any]:
        self._held = []
        self._context.trim(0)
        began_s = now()
        self._context.evaluate(ids, 0, cancelled=lambda: False)
        self._context.logits().argmax()
        return {"tokens": len(ids), "seconds": now() - began_s}


class GenAi:
    """``ContinuousBatchingPipeline`` with its prefix cache, driven step by step."""

    def __init__(self, settings: EngineSettings) -> None:
        import openvino
        import openvino_genai

        from modeld.workers.openvino.native import PRECISION

        self._genai: Any = openvino_genai
        self._ov: Any = openvino
        scheduler = self._genai.SchedulerConfig()
        scheduler.num_kv_blocks = settings.window // 32 + 64
        scheduler.cache_size = 0
        scheduler.max_num_batched_tokens = CHUNK
        scheduler.enable_prefix_caching = True
        self._pipeline = self._genai.ContinuousBatchingPipeline(
            settings.model,
            scheduler,
            "CPU",
            {
                "KV_CACHE_PRECISION": "f16",
                "INFERENCE_PRECISION_HINT": PRECISION,
                "INFERENCE_NUM_THREADS": settings.threads,
                "ENABLE_CPU_PINNING": False,
            },
        )
        self._requests = 0

    def _run(self, ids: list[int], tokens: int) -> tuple[list[int], float, float]:
        """Greedy ids, seconds to the first, seconds for the others."""
        config = self._genai.GenerationConfig()
        config.max_new_tokens = tokens
        config.ignore_eos = True
        config.do_sample = False
        config.apply_chat_template = False
        began_s = now()
        self._requests += 1
        prompt = self._ov.Tensor(np.asarray([ids], dtype=np.int64))
        handle = self._pipeline.add_request(self._requests, prompt, config)
        made: list[int] = []
        first_s = 0.0
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            while handle.can_read():
                for output in handle.read().values():
                    made += output.generated_ids
                first_s = first_s or now()
        return made, first_s - began_s, now() - first_s

    def decode(
        self, prefix: list[int], suffix: list[int], tokens: int, texts: list[str]
    ) -> dict[str, Any]:
        ids, first_s, rest_s = self._run([*prefix, *suffix], tokens)
        return {"ids": ids, "first_s": first_s, "rest_s": rest_s}

    def prefill(self, ids: list[int]) -> dict[str, Any]:
        made, seconds, _ = self._run(ids, 1)
        return {"tokens": len(ids) if made else 0, "seconds": seconds}


def make(kind: Kind, settings: EngineSettings) -> Any:
    return Paged(settings) if kind == "paged" else GenAi(settings)
