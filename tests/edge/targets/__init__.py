"""Which endpoints a request may name."""
