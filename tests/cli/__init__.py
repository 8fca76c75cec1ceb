"""The commands for authors of agents."""
