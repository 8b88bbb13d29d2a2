"""See, predict and control where attention looks, from the eigenspectrum of each head's query-key matrix."""
