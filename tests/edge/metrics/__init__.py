"""What a server counts."""
