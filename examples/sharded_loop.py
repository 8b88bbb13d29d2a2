"""LocAteR in a loop of torchtitan's kind: the model sharded by FSDP2; runs as one process, or under torchrun."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from locater.stabilisers import LocAteR, Projected, WarmUp
from locater_lab.train.processes import leave

# A single process needs neither a port nor environment variables; torchrun sets both for several.
single = dict(store=dist.HashStore(), rank=0, world_size=1)
dist.init_process_group("gloo", **({} if dist.is_torchelastic_launched() else single))
torch.manual_seed(0)
sizes = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, intermediate_size=64)
model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=128))
for block in model.model.layers:
    fully_shard(block)
fully_shard(model)

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
locater = LocAteR(model, strength="auto", mean=Projected(WarmUp(0.5, steps=10)), optimizer=optimizer)

for _ in range(15):
    tokens = torch.randint(0, 128, (4, 32))
    optimizer.zero_grad()
    model(input_ids=tokens, labels=tokens).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    locater.step()  # no message between ranks: each holds whole heads

checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "locater": locater.state_dict()}
metrics = locater.metrics()  # every rank takes part
if dist.get_rank() == 0:
    for name, value in metrics.items():
        print(f"{name} {value:.3f}")
dist.barrier()  # no rank leaves while another still waits for its message
dist.destroy_process_group()
if dist.is_torchelastic_launched():
    leave(0)  # gloo's threads may outlive their group, and abort a Python that is being finalised
