"""Execution of tool calls: executor, slots, result cache, truncation and policies."""
