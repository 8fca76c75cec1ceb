"""Which endpoints a request may name: checked when the request comes, and again when their names are looked up."""
