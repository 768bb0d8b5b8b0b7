"""Control tokens whose texts a converted folder quotes byte by byte."""

from __future__ import annotations

from pathlib import Path

from modeld.workers.openvino.native import core
from modeld.workers.openvino.tokenizer import OpenVinoTokenizer
from modeld.workers.openvino.tokenizer_graph import encoder_graph, with_tokenizers
from tests.support.openvino_models import tiny_ir

NAMED = ("<｜begin▁of▁sentence｜>", "<｜｜>", "a\\｜")


def test_control_tokens_beyond_ascii_are_known_and_stay_text_in_a_message(tmp_path: Path) -> None:
    folder = tiny_ir(tmp_path / "ir", controls=NAMED)
    graph = encoder_graph(with_tokenizers(core()), folder, "openvino_tokenizer")
    assert {one.text for one in graph.specials} >= set(NAMED)
    tokenizer = OpenVinoTokenizer(folder, core())
    for text in NAMED:
        token = tokenizer.controls[text]
        assert tokenizer.piece(token) == text.encode()
        ids = tokenizer.encode(f"x{text} {text}")
        assert token not in ids
        assert b"".join(map(tokenizer.piece, ids)).decode() == f"x{text} {text}"
