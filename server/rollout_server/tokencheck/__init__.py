"""Check whether a tokenizer and its chat template are safe for training with token masks, by simulating hard conversations.

The check needs no server and no trainer. It contains no rules for particular models: it finds a template's behaviour by
rendering.
"""
