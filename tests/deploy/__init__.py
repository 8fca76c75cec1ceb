"""Everything that deploys the server: checked by linters, held against the settings, and run."""
