"""The live page at `/`: its files, and the routes that serve them. The page reads the REST API, and nothing else."""
