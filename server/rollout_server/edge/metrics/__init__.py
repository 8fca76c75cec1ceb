"""Metrics of a server in Prometheus' format.

`families` defines the metrics, `observer` updates them from rollouts, and `server` exposes them on a separate port.
"""
