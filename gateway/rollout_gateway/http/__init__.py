"""HTTP listener: limits, TLS, metrics, request ids and shutdown."""
