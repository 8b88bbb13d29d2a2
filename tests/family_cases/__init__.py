"""One row per family."""

from . import encoders, gpt, llama, seq2seq, vision

CASES = [case for module in (gpt, llama, encoders, seq2seq, vision) for case in module.CASES]
