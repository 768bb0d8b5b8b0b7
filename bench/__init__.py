"""Labelled benchmarks of modeld: ``python -m bench``."""
