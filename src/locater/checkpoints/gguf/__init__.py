"""GGUF files: a header, tensors by name and row, and the way back to the names and layout of the model's own code."""
