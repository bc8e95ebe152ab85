"""Text to token ids and back, chat templates, streamed detokenization, stop strings. No GPU, no torch."""
