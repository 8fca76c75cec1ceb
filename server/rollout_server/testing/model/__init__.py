"""Scripted models: scripts, scenarios, and a model that does arithmetic."""
