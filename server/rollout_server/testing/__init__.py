"""Testing tools that ship with the server: a strict trainer, scripted models, a toy tokenizer.

`StrictTrainer` is an independent judge. Nothing that it is made of imports anything of the server, so that a mistake in
how the server counts tokens cannot be made twice.
"""
