"""The rollouts that a server knows: admission, the queue, look-up, retention and the outbox of outcomes."""
