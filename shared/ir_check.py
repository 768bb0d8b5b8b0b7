"""Proof, before any engine opens it, that an OpenVINO folder is whole: its files and their sizes.

Reads the models' structure as XML and no weights. What a model is, is ``ir_facts``'s to say.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from modeld.shared.ir_embedding import gives_hidden_states
from modeld.shared.ir_files import MAX_XML_BYTES, file_size, read_elements, refused
from modeld.shared.ir_vision import LANGUAGE, NEEDED, check_preprocessor, vision_parts

MODEL, TOKENIZER, DETOKENIZER = (
    f"openvino_{part}" for part in ("model", "tokenizer", "detokenizer")
)
VERSIONS = ("10", "11")  # of the IR format
MAX_CONSTANTS = 1_000_000
_MAX_DIGITS = 18  # of an offset or a size


def check_folder(folder: Path) -> None:
    """Raise ModelLoadFailed unless the model and its tokenizer are there and whole.

    Whole: the XML is well-formed and of a known version, and every constant that it claims lies
    in the ``.bin`` beside it. A model that makes embeddings needs no detokenizer; one that sees
    is of several, all of which are checked.
    """
    needed = {TOKENIZER: "the tokenizer", DETOKENIZER: "the detokenizer"}
    vision = os.path.lexists(folder / f"{LANGUAGE}.xml")
    models = dict(NEEDED) if vision else {MODEL: "the model"}
    if vision:
        models |= {stem: "a part" for stem in vision_parts(folder) if stem not in models}
    for stem, what in models.items():
        _check_present(folder, stem, what)
        check_extents(folder, stem)
    if vision:
        check_preprocessor(folder)
    if (
        not vision
        and gives_hidden_states(folder / f"{MODEL}.xml")
        and not (folder / f"{DETOKENIZER}.xml").exists()
    ):
        del needed[DETOKENIZER]
    for stem, what in needed.items():
        _check_present(folder, stem, what)
        check_extents(folder, stem)


def _check_present(folder: Path, stem: str, what: str) -> None:
    missing = [name for name in (f"{stem}.xml", f"{stem}.bin") if not (folder / name).exists()]
    if missing:
        hint = "" if stem == MODEL else " (an export with `optimum-cli export openvino` writes it)"
        raise refused(folder, f"{what} is missing: it has no {' and no '.join(missing)}{hint}")


def check_extents(folder: Path, stem: str) -> int:
    """The bytes of ``<stem>.bin`` that ``<stem>.xml`` claims; ModelLoadFailed if there are fewer,
    or if the XML isn't an IR.
    """
    xml, weights = folder / f"{stem}.xml", folder / f"{stem}.bin"
    size = file_size(weights)
    constants = claimed = 0
    kind = ""

    def element(name: str, attributes: Mapping[str, str], around: list[str]) -> None:
        nonlocal constants, claimed, kind
        if not around and (name != "net" or attributes.get("version") not in VERSIONS):
            raise refused(
                xml,
                f"it is {name!r:.40} of version {attributes.get('version', '')!r:.20}, not an IR "
                f"of version {' or '.join(VERSIONS)}",
            )
        if name == "layer":
            kind = attributes.get("type", "")
        elif name == "data" and kind == "Const" and around[-1] == "layer":
            constants += 1
            if constants > MAX_CONSTANTS:
                raise refused(xml, f"it has more than {MAX_CONSTANTS} constants")
            end = _number(xml, attributes, "offset") + _number(xml, attributes, "size")
            claimed = max(claimed, end)

    read_elements(xml, element, MAX_XML_BYTES)
    if claimed > size:
        raise refused(
            weights, f"it is truncated: {xml.name} needs {claimed} bytes of it, the file has {size}"
        )
    return claimed


def _number(xml: Path, attributes: Mapping[str, str], name: str) -> int:
    text = attributes.get(name, "")
    if not text.isascii() or not text.isdigit() or len(text) > _MAX_DIGITS:
        raise refused(xml, f"a constant's {name} is {text!r:.40}, not a number of bytes")
    return int(text)
