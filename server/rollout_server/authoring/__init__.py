"""The parts of the commands for authors: loading agents, project templates, validation, datasets, evaluation and reports.

Nothing here starts a server. Rollouts are run through `rollout_client`, as any client does.
"""
