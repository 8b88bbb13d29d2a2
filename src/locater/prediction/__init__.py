"""Predict each head's attention from its weights and single tokens of its inputs, and compare it with measurement."""
