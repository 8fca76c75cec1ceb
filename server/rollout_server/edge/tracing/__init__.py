"""Traces and metrics over OpenTelemetry. Without an SDK, or without `opentelemetry-api`, nothing here does anything."""
