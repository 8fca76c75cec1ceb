"""`make bench`: the server's cost for each API and workload, beside minimal loops that are measured in the same rounds."""
