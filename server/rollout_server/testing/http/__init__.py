"""The HTTP API of a strict trainer: both OpenAI-style trainer protocols, the outcome receiver and broken responses."""
