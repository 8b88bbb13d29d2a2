"""Verbs of the laboratory, which join the command line by entry points."""
