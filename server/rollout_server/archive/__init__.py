"""Saved rollouts, read-only: from files, from the journal of a stopped server, and in documents.

`files` and `journal` find rollouts and read each one when it is needed. `service` serves them with the read calls of
RolloutService, so that the gateway and its page work over them; `server` runs both. `remote` shows those of a running server, and
`document` writes rollouts as one HTML file.
"""
