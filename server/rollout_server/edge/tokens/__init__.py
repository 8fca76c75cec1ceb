"""Tokenizers and chat templates: render a conversation to token ids.

Importing this package imports neither transformers nor a tokenizer. Both are loaded in a thread, when a rollout names a
tokenizer.
"""
