"""The strict trainer's model: scripts as JSON, and a model that does arithmetic."""
