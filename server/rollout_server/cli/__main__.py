"""Run the command line with `python -m rollout_server.cli`."""

from rollout_server.cli import main

main()
