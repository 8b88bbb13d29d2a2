"""Files written by `torch.save`, read without executing anything."""
