"""What each head will do, from its weights and single tokens of its inputs, held against what it does."""
