# Generated from rollout_client/_async/__init__.py by gateway/unasync.py. Change that file, then run `make sync-client`.
"""The client and its streams of events for threads."""
