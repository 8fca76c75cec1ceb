"""Commands for writing, running and inspecting agents."""
