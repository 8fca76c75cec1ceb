"""Running tool calls: the executor, slots, the result cache, truncation and policies."""
