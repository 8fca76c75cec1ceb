"""Looking at a rollout: where it comes from, what it says token by token, and how that is drawn.

Everything is read into the contract's `Rollout`, turned into a `Transcript`, and told as text or JSON. What models wrote is
hostile until it was made visible: no control character of it reaches a terminal.
"""
