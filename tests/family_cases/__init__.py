"""One row per family."""

from . import encoders, gemma, gpt, hybrid, internlm2, latent, llama, seq2seq, vision

MODULES = (gpt, llama, gemma, internlm2, latent, hybrid, encoders, seq2seq, vision)
CASES = [case for module in MODULES for case in module.CASES]
