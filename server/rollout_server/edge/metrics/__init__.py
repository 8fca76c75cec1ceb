"""What a server counts, in the form that Prometheus reads.

`observer` counts what happens to rollouts, `families` says what there is to count, `port` shows it on a port of its own.
"""
