"""The HTTP listener: limits, TLS, metrics, deadlines, request ids and shutdown."""
