"""The rollouts of a server: admitted, queued for a slot, found again, delivered to receivers, and remembered for a while."""
