"""The rollouts of a server: admission, queue, lookup, delivery of outcomes, and retention of finished rollouts."""
