"""Metrics of a server."""
