"""Views of a rollout, token by token, as terminal text or JSON.

`load` reads a protobuf `Rollout`, `so_far` completes one that still runs, `transcript` converts it to a `Transcript`, and
`terminal` and `text` render that. Text from models and trainers is untrusted: `escape` makes control characters visible, so that
none reaches a terminal.
"""
