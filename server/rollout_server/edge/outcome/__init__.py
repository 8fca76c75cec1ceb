"""Tells receivers how rollouts ended."""
