"""Targets that requests may name."""
