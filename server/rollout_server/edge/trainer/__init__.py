"""Trainers: who completes."""
