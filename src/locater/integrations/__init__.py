"""Other people's training loops: import the one you use, each needs its own library."""
