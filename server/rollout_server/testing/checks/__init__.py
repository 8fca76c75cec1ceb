"""What a strict trainer checks: masks, histories, token mode, and the rules of each protocol. No I/O."""
