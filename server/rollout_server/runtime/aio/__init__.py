"""Helpers for asyncio: the program's event loop, its watchdog, threads, and source locations of authors' code."""
