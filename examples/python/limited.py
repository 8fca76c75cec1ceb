"""Run the Python code on standard input within resource limits: `limited.py CPU_SECONDS`."""

import resource
import sys

SECONDS, MEMORY, FILE = int(sys.argv[1]), 512 * 1024 * 1024, 1024 * 1024

for limit, amount in (
    (resource.RLIMIT_CPU, SECONDS),
    (resource.RLIMIT_AS, MEMORY),
    (resource.RLIMIT_FSIZE, FILE),
    (resource.RLIMIT_CORE, 0),
):
    resource.setrlimit(limit, (amount, amount))
exec(compile(sys.stdin.read(), "<program>", "exec"), {"__name__": "__main__"})
