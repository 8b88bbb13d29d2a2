"""The laboratory: trainer, data, studies, sweeps, demo and explorer; the library never imports it."""
