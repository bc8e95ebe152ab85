"""The OpenAI-compatible server: HTTP, protocol types, tool-call and reasoning parsers. Knows messages, not tensors."""
