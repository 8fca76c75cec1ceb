"""Several rollout servers behind one gateway: members, routing and merged pages."""
