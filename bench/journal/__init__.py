"""Benchmark of the journal: `python -m bench.journal`."""
