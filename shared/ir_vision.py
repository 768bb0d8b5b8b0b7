"""Whether an OpenVINO folder holds a vision-language model, and of which files it is made.

Knows names only; loads no engine and reads no file.
"""

from __future__ import annotations

from pathlib import Path

from modeld.shared.ir_files import refused

LANGUAGE, TEXT_EMBEDDINGS, VISION_EMBEDDINGS = (
    f"openvino_{part}_model" for part in ("language", "text_embeddings", "vision_embeddings")
)
NEEDED = {
    LANGUAGE: "the language model",
    TEXT_EMBEDDINGS: "the model of text embeddings",
    VISION_EMBEDDINGS: "the vision encoder",
}
# Says how an image is brought to the encoder's form; the engine has defaults, which may be wrong.
PREPROCESSOR = "preprocessor_config.json"
MAX_PARTS = 32
_NO_PARTS = ("openvino_tokenizer", "openvino_detokenizer")


def sees(folder: Path) -> bool:
    """Whether it is made as a vision-language model is."""
    return all((folder / f"{stem}.xml").exists() for stem in NEEDED)


def check_preprocessor(folder: Path) -> None:
    """Raises ModelLoadFailed where the folder doesn't say how images are prepared."""
    if not (folder / PREPROCESSOR).is_file():
        raise refused(folder, f"it has no {PREPROCESSOR}, which says how images are prepared")


def vision_parts(folder: Path) -> list[str]:
    """The names of all its models without their ends, tokenizers left out.

    Some have more than the three, as a resampler.
    """
    stems = sorted(path.stem for path in folder.glob("openvino_*.xml"))
    return [stem for stem in stems if stem not in _NO_PARTS][:MAX_PARTS]
