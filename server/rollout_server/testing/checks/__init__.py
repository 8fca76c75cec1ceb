"""The checks of a strict trainer: masks, histories, token mode and the rules of each protocol. No I/O."""
