"""The HTTP side of a strict trainer: both OpenAI-style protocols, the outcome receiver and broken responses."""
