"""Rules for the endpoints that a request may name. They are checked when the request arrives and again after each DNS lookup."""
