"""Whether a tokenizer and its chat template are safe for training on token masks: simulated hard conversations.

It needs no server and no trainer. Nothing in it knows a model by name: what a template does is found by rendering.
"""
