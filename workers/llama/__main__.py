"""The llama worker process: ``python -m modeld.workers.llama``.

Sets what the engine's libraries read when they load; the rest is the runtime's.
"""

from __future__ import annotations

import os
import sys


def main() -> int:
    # The launcher sets these too. They must be there before the first native import.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")
    from modeld.workers.executor import Handler
    from modeld.workers.runtime import main as serve

    def make_handler() -> Handler:
        # Imported by the runtime's own call: an engine that doesn't import is an exit code there.
        from modeld.workers.core import SessionCore
        from modeld.workers.llama.engine import LlamaEngine

        return SessionCore(LlamaEngine())

    return serve(make_handler)


if __name__ == "__main__":
    sys.exit(main())
