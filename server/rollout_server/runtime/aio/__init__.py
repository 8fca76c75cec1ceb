"""Helpers for asyncio: the event loop of a program, threads, and the source locations of authors' code."""
