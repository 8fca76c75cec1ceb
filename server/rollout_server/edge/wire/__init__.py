"""Protos <-> core, and nowhere else."""
