"""Groups: rollouts of one prompt that were started together, their early stop, their refills, and the reward over a group."""
