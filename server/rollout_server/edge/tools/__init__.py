"""Tools in processes, and the length of what they say in tokens."""
