"""Delivery of outcomes to their receivers."""
