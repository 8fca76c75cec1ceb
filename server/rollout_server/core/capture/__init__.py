"""Which conversation of a rollout a model call continues, for agents that own their loop. Pure: decided from what a call sends."""
