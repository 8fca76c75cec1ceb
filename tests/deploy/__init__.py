"""Deployment files: checked by linters, compared with the settings, and run."""
