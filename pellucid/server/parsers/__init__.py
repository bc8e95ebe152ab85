"""Model output to reasoning, content and tool calls: one grammar for a whole text and for any chunking of it."""
