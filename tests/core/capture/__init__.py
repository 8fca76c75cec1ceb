"""Tests of the decisions for agents that own their loop."""
