"""Conversion between the protos of osmosis.rollout.v1 and core values. No other package converts them."""
