"""LocAteR in a plain PyTorch loop: two lines more."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from locater.stabilisers import LocAteR, Projected, WarmUp

torch.manual_seed(0)
config = GPT2Config(n_layer=2, n_head=4, n_embd=64, vocab_size=128, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
# Shrink the scale of each head's spectrum; take its mean to half of λ within ten steps and hold it there.
locater = LocAteR(model, strength="auto", mean=Projected(WarmUp(0.5, steps=10)), optimizer=optimizer)

for _ in range(20):
    tokens = torch.randint(0, 128, (4, 32))
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    locater.step()  # after the optimiser, as weight decay in AdamW
    optimizer.zero_grad()

for name, value in locater.metrics().items():
    print(f"{name} {value:.3f}")
