"""Measures candidates on the user's machine and keeps what was found. Called by engine start-up and `pellucid tune`."""
