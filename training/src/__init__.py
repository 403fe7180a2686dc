"""The training harness: run from inside training/, where this package is importable as `src`."""
