"""Tests of `rollout inspect`."""
