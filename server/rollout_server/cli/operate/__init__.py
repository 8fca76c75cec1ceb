"""Commands that run and look after servers."""
