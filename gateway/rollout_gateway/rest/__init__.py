"""REST API: routes of rollouts, events and the service, and the conversion between their JSON and protos."""
