"""What is asked of heads: their spectra as rows, regimes, findings, and what moved between checkpoints."""
