"""Attacks on a real server: how it responds, and what they cost it."""
