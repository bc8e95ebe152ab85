"""From a checked request to a running generation, whichever endpoint it came by."""
