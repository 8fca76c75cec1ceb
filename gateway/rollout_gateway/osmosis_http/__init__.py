"""Synchronous and asynchronous HTTP API: routes, bodies and their conversion to protos."""
