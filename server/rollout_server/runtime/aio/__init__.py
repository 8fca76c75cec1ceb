"""Helpers for asyncio: the event loop of a program, its watchdog, threads, and the source locations of authors' code."""
