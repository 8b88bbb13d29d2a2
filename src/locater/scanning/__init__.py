"""Questions about heads: their spectra as rows, regimes, findings, and what moved between checkpoints."""

DEFAULT_LENGTH = 1024  # T, the number of tokens that the theory supposes unless told
