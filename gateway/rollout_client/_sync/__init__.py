# Generated from rollout_client/_async/__init__.py by gateway/unasync.py. Change that file, then run `make sync-client`.
"""Client and event streams for synchronous code."""
