"""One file an endpoint, and how its protocol writes what a generation gives."""
