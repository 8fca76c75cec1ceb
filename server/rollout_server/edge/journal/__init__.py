"""The journal of rollouts on a disk, and the encoding of what it stores (osmosis.journal.v1)."""
