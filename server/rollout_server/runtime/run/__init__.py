"""One running rollout: the driver, the `Run` that its agent uses, and its messages, tool calls and reward."""
