"""The parts of the commands for authors: loading agents, project templates, validation, datasets and single rollouts.

Nothing here starts a server. Rollouts are run through `rollout_client`, as any client does.
"""
