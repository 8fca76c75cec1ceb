"""Evaluation of agents on datasets: running the rollouts, results and samples files, statistics, and the HTML report.

Nothing here starts a server. Rollouts are run through `rollout_client`, as any client does.
"""
