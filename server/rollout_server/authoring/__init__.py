"""What the commands for authors of agents are made of: finding an agent, a project to begin with, validation, datasets,
evaluation and its report.

Nothing here starts a server: rollouts are asked for over a client, as anybody asks for them.
"""
