"""`rollout verify`: samples of real rollouts have no findings, each planted fault has one at its row and index."""
