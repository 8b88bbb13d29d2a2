"""Text to tokens to batches that are a pure function of the step."""
