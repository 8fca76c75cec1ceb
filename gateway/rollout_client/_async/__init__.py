"""Client and event streams for asyncio. `gateway/unasync.py` generates `rollout_client._sync` from this package."""
