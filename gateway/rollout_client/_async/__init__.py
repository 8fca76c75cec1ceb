"""The client and its streams of events for an event loop. `gateway/unasync.py` writes `rollout_client._sync` from this package."""
