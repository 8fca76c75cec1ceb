"""Conversion between protos and core values. No other package converts them."""
