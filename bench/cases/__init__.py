"""The measurements, one module for each promise."""
