"""The engine without the product around it: ``python -m bench.engine_control KIND``.

Answers one JSON line for each line that it reads. Kinds: ``bare`` (the library's functions),
``engine`` (the worker's own engine class), ``link`` (a real worker behind the supervisor's link,
without gRPC), ``high_level`` (the binding's ``Llama`` class); on OpenVINO ``paged`` (the worker's
own engine class) and ``genai`` (GenAI's continuous batching).
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from bench.control import EngineSettings, Kind
from bench.keeping import KeptWorker
from modeld.shared.messages import LoadOp

now = time.perf_counter


class Loop(Protocol):
    """Greedy tokens after ``suffix``, the first of them first; the prefix is resident."""

    def hold(self, prefix: list[int]) -> None:
        """Make exactly the prefix resident; not timed."""

    def begin(self, prefix: list[int], suffix: list[int]) -> int: ...

    def next(self, token: int) -> int:
        """Evaluate the token and answer the one after it."""


def timed_decode(loop: Loop, prefix: list[int], suffix: list[int], tokens: int) -> dict[str, Any]:
    loop.hold(prefix)
    began_s = now()
    ids = [loop.begin(prefix, suffix)]
    first_s = now()
    for _ in range(tokens - 1):
        ids.append(loop.next(ids[-1]))
    return {"ids": ids, "first_s": first_s - began_s, "rest_s": now() - first_s}


class Bare:
    """``llama_decode`` and an argmax, nothing else."""

    def __init__(self, settings: EngineSettings) -> None:
        from modeld.workers.llama.native import llama, start

        start()
        self._llama: Any = llama
        model_parameters = llama.llama_model_default_params()
        model_parameters.use_extra_bufts = False  # the product's kernels
        self._model = llama.llama_model_load_from_file(settings.model.encode(), model_parameters)
        parameters = llama.llama_context_default_params()
        parameters.n_ctx = settings.window
        parameters.n_batch, parameters.n_ubatch = settings.n_batch, settings.n_ubatch
        parameters.n_threads = parameters.n_threads_batch = settings.threads
        parameters.flash_attn_type = 0
        parameters.no_perf = True
        self._context = llama.llama_init_from_model(self._model, parameters)
        if not self._context:
            raise MemoryError("the engine made no context")
        self._memory = llama.llama_get_memory(self._context)
        vocabulary = llama.llama_model_get_vocab(self._model)
        self._shape = (llama.llama_vocab_n_tokens(vocabulary),)
        self._step = settings.n_batch
        self._held: list[int] = []

    def _evaluate(self, ids: list[int]) -> None:
        array = (self._llama.llama_token * len(ids))(*ids)
        for begin in range(0, len(ids), self._step):
            size = min(self._step, len(ids) - begin)
            part = ctypes.cast(
                ctypes.byref(array, begin * ctypes.sizeof(self._llama.llama_token)),
                ctypes.POINTER(self._llama.llama_token),
            )
            batch = self._llama.llama_batch_get_one(part, size)
            code = self._llama.llama_decode(self._context, batch)
            if code != 0:
                raise RuntimeError(f"llama_decode answered {code}")

    def _argmax(self) -> int:
        pointer = self._llama.llama_get_logits_ith(self._context, -1)
        return int(np.ctypeslib.as_array(pointer, shape=self._shape).argmax())

    def hold(self, prefix: list[int]) -> None:
        if self._held == prefix:
            self._llama.llama_memory_seq_rm(self._memory, 0, len(prefix), -1)
            return
        self._llama.llama_memory_clear(self._memory, False)
        self._evaluate(prefix)
        self._held = list(prefix)

    def begin(self, prefix: list[int], suffix: list[int]) -> int:
        self._evaluate(suffix)
        return self._argmax()

    def next(self, token: int) -> int:
        self._evaluate([token])
        return self._argmax()

    def decode(
        self, prefix: list[int], suffix: list[int], tokens: int, texts: list[str]
    ) -> dict[str, Any]:
        return timed_decode(self, prefix, suffix, tokens)

    def prefill(self, ids: list[int]) -> dict[str, Any]:
        self._held = []
        self._llama.llama_memory_clear(self._memory, False)
        began_s = now()
        self._evaluate(ids)
        self._argmax()  # the library may still compute until its results are read
        seconds = now() - began_s
        held = self._llama.llama_memory_seq_pos_max(self._memory, 0) + 1
        return {"tokens": held, "seconds": seconds}


class Engine:
    """The worker's engine class, with the checks that it makes at every call."""

    def __init__(self, settings: EngineSettings) -> None:
        from modeld.workers.llama.engine import LlamaEngine

        self._engine = LlamaEngine()
        self._engine.load(load_request(settings), lambda stage, fraction: None, lambda: False)
        self._context = self._engine.new_context(settings.window, "f16", "f16")
        self._held: list[int] = []
        self._length = 0

    def _evaluate(self, ids: list[int]) -> None:
        self._context.evaluate(ids, self._length, cancelled=lambda: False)
        self._length += len(ids)

    def hold(self, prefix: list[int]) -> None:
        if self._held != prefix:
            self._length = 0
            self._context.trim(0)
            self._evaluate(prefix)
            self._held = list(prefix)
        self._length = len(prefix)
        self._context.trim(self._length)

    def begin(self, prefix: list[int], suffix: list[int]) -> int:
        self._evaluate(suffix)
        return int(self._context.logits().argmax())

    def next(self, token: int) -> int:
        self._context.step(token, self._length)
        self._length += 1
        return int(self._context.logits().argmax())

    def decode(
        self, prefix: list[int], suffix: list[int], tokens: int, texts: list[str]
    ) -> dict[str, Any]:
        return timed_decode(self, prefix, suffix, tokens)

    def prefill(self, ids: list[int]) -> dict[str, Any]:
        self._held, self._length = [], 0
        self._context.trim(0)
        began_s = now()
        self._evaluate(ids)
        self._context.logits()
        return {"tokens": self._length, "seconds": now() - began_s}


class HighLevel:
    """``llama_cpp.Llama`` as its documentation shows it, with its own reuse of a prefix."""

    def __init__(self, settings: EngineSettings) -> None:
        import llama_cpp

        library: Any = llama_cpp.llama_cpp
        defaults = library.llama_model_default_params

        def parameters() -> Any:
            # The class has no setting for this. Repacked weights choose kernels that a virtual
            # machine may announce and not execute, and both sides must compute with the same.
            made = defaults()
            made.use_extra_bufts = False
            return made

        library.llama_model_default_params = parameters
        self._llama: Any = llama_cpp.Llama(
            settings.model,
            n_ctx=settings.window,
            n_batch=settings.n_batch,
            n_ubatch=settings.n_ubatch,
            n_threads=settings.threads,
            n_threads_batch=settings.threads,
            flash_attn=False,
            no_perf=True,
            verbose=False,
        )
        self._tokens: Iterator[int] = iter(())

    def hold(self, prefix: list[int]) -> None:
        next(self._llama.generate(prefix, temp=0.0))

    def begin(self, prefix: list[int], suffix: list[int]) -> int:
        self._tokens = self._llama.generate([*prefix, *suffix], temp=0.0)
        return next(self._tokens)

    def next(self, token: int) -> int:
        return next(self._tokens)

    def decode(
        self, prefix: list[int], suffix: list[int], tokens: int, texts: list[str]
    ) -> dict[str, Any]:
        return timed_decode(self, prefix, suffix, tokens)

    def turn(self, prefix: str, suffix: str, tokens: int, chat: bool) -> dict[str, Any]:
        began_s, first_s, prompt, chunks = now(), 0.0, 0, 0
        for piece in self._stream(prefix, suffix, tokens, chat):
            if piece and not chunks:
                first_s = now() - began_s
                prompt = self._llama.n_tokens
            chunks += bool(piece)
        return {"prompt": prompt, "tokens": chunks, "first_s": first_s}

    def _stream(self, prefix: str, suffix: str, tokens: int, chat: bool) -> Iterator[str]:
        options: dict[str, Any] = {"max_tokens": tokens, "temperature": 0.0, "stream": True}
        if not chat:
            for event in self._llama.create_completion(prefix + suffix, **options):
                yield event["choices"][0]["text"]
            return
        # The product is told to go on past the end; the class knows no other way than a ban.
        options["logit_bias"] = {self._llama.token_eos(): -1e9}
        messages = [{"role": "system", "content": prefix}, {"role": "user", "content": suffix}]
        for event in self._llama.create_chat_completion(messages, **options):
            yield event["choices"][0]["delta"].get("content") or ""


class Link:
    """A real worker behind the supervisor's keeper and link; no daemon, no gRPC."""

    def __init__(self, settings: EngineSettings, folder: Path) -> None:
        self._loop = asyncio.new_event_loop()
        self._worker = KeptWorker(folder / "link", "modeld.workers.llama")
        self._loop.run_until_complete(self._worker.start())
        self._loop.run_until_complete(self._worker.load(load_request(settings), settings.window))

    def decode(
        self, prefix: list[int], suffix: list[int], tokens: int, texts: list[str]
    ) -> dict[str, Any]:
        before, after = texts
        return self._loop.run_until_complete(self._worker.turn(before, after, tokens))

    def close(self) -> None:
        self._loop.run_until_complete(self._worker.stop())


def load_request(settings: EngineSettings) -> LoadOp:
    return LoadOp(
        path=settings.model,
        model="bench",
        digest="",
        n_batch=settings.n_batch,
        n_ubatch=settings.n_ubatch,
        threads=settings.threads,
    )


def make(kind: Kind, folder: Path, settings: EngineSettings) -> Any:
    if kind == "link":
        return Link(settings, folder)
    if kind in ("paged", "genai"):
        from bench import openvino_control

        return openvino_control.make(kind, settings)
    kinds: dict[str, Callable[[EngineSettings], Any]] = {
        "bare": Bare,
        "engine": Engine,
        "high_level": HighLevel,
    }
    return kinds[kind](settings)


def main() -> int:
    kind: Any = sys.argv[1]
    # Answers go to what was standard output; what a library prints goes to the log.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    side: Any = None
    for line in sys.stdin:
        asked = json.loads(line)
        do = asked.pop("do")
        try:
            if do == "start":
                side = make(kind, Path(asked.pop("folder")), EngineSettings(**asked))
                answer: dict[str, Any] = {}
            else:
                answer = getattr(side, do)(**asked)
        except Exception as error:  # crosses the pipe as words, and ends as a failed row
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    if hasattr(side, "close"):
        side.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
