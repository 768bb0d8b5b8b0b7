"""``python -m modeld`` is the ``modeld`` command."""

from modeld.cli.main import main

if __name__ == "__main__":
    main()
