"""The OpenVINO worker process: ``python -m modeld.workers.openvino``."""

from __future__ import annotations

import sys


def main() -> int:
    from modeld.workers.executor import Handler
    from modeld.workers.runtime import main as serve

    def make_handler() -> Handler:
        # Imported by the runtime's own call: an engine that doesn't import is an exit code there.
        from modeld.workers.core import SessionCore
        from modeld.workers.openvino.engine import OpenVinoEngine

        return SessionCore(OpenVinoEngine())

    return serve(make_handler)


if __name__ == "__main__":
    sys.exit(main())
