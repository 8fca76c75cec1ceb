"""Attacks on a real server: what it answers, and what they cost it."""
