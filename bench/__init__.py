"""Benchmark: CPU cost of one turn on the real server, compared with a bare loop without token accounting (`python -m bench`)."""
