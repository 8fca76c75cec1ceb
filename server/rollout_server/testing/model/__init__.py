"""The strict trainer's model: scripts as JSON, scenarios, and a model that does arithmetic."""
