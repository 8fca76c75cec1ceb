"""Tools in separate processes, and measuring of tool results in tokens."""
