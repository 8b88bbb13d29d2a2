"""The machinery between a stabiliser and a live model: weights of heads, shards of them, calls of the kernel."""
