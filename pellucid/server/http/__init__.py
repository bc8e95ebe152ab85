"""Connections, bodies, errors and streams: all that endpoints need not know of HTTP."""
