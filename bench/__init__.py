"""What a turn costs: the real server beside a bare loop that does the same without tokens, in one run (`python -m bench`)."""
