"""Commands for operating servers, gateways and trainers."""
