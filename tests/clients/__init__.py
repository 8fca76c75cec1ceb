"""Agents that own their loop, unchanged, on the model endpoint of a real server: SDKs, frameworks, a shell script, three CLIs."""
