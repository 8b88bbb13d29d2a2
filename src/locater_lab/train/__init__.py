"""A small trainer: one loop, from one processor to many, that continues to the bit where it was stopped."""
