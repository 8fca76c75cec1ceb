"""One rollout while it runs: the driver, the `Run` that an agent holds, its messages, tool calls and reward."""
