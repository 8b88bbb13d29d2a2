"""What each head will do, from its weights and the moments of its inputs, held against what it does."""
