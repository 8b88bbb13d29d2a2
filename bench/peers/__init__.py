"""What the benches measure against: checkpoints, tools, and the environments in which they run."""
