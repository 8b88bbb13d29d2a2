"""The family tables: one file for each group of families, one row for each model type."""
