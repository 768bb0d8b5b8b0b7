"""modeld: a crash-isolated local inference daemon."""

__version__ = "0.1.0"
