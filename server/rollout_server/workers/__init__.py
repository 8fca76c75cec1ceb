"""Several processes that serve as one: `rollout serve --workers N`.

The parent (`supervisor`) holds the ports, starts the workers and starts one again that dies; it runs no rollouts. Each worker is a
whole server with a journal of its own. All listen on the public ports (SO_REUSEPORT), and each on a private Unix socket, over
which it passes on the calls for rollouts of the others (`call_router`). A uid names its server.
"""
