"""Tokenizers and chat templates: what a conversation looks like in tokens.

Importing it loads neither transformers nor a tokenizer; that happens in a thread, when a rollout names one.
"""
