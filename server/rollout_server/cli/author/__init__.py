"""Commands for authors of agents."""
