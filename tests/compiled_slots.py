"""Run on its own: stabilisers in the slots of a compiled model, against the same model as written; exits 1 on a gap.

Attached before and after compiling; taken off, the compiled model computes what it did without them.
"""

import torch

from locater.stabilisers import EntropyBonus, LocAteR, QKClip, QKDecay, QKNorm, SigmaReparam, SoftCap, ZLoss
from locater_lab.rivals import SpectralNorm
from stabiliser_models import TOKENS, llama

KINDS = {
    "soft-cap": lambda model: SoftCap(model, cap=0.02),
    "qk-norm": lambda model: QKNorm(model),
    "qk-clip": lambda model: QKClip(model, threshold=1e-3),
    "z-loss": lambda model: ZLoss(model, weight=1.0),
    "entropy": lambda model: EntropyBonus(model, weight=1.0),
    "locater": lambda model: LocAteR(model, strength=1e-2),
    "qk-decay": lambda model: QKDecay(model, decay=0.1),
    "sigma-reparam": lambda model: SigmaReparam(model.eval()),
    "spectral-norm": lambda model: SpectralNorm(model.eval()),
}


def grown() -> torch.nn.Module:
    torch.manual_seed(0)
    model = llama(num_hidden_layers=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    return model


def one_step(model: torch.nn.Module, plain: torch.nn.Module, stabiliser) -> list[torch.Tensor]:
    """The loss, every gradient, and the weights after the stabiliser's step."""
    loss = model(input_ids=TOKENS, labels=TOKENS).loss + stabiliser.penalty()
    plain.zero_grad()
    loss.backward()
    gradients = [parameter.grad.clone() for parameter in plain.parameters()]
    stabiliser.step()
    return [loss.detach(), *gradients, *(parameter.detach().clone() for parameter in plain.parameters())]


torch.set_num_threads(1)
with torch.no_grad():
    bare = grown()(input_ids=TOKENS).logits
for name, make in KINDS.items():
    eager = grown()
    expected = one_step(eager, eager, make(eager))
    for attached_first in (True, False):
        torch._dynamo.reset()
        plain = grown()
        stabiliser = make(plain) if attached_first else None
        compiled = torch.compile(plain, backend="aot_eager")
        if stabiliser is None:
            with torch.no_grad():
                compiled(input_ids=TOKENS)  # compiled without the slot
            stabiliser = make(plain)
        found = one_step(compiled, plain, stabiliser)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        stabiliser.detach()
        fresh = grown()
        plain.load_state_dict(fresh.state_dict())
        with torch.no_grad():
            torch.testing.assert_close(compiled(input_ids=TOKENS).logits, bare, rtol=1e-4, atol=1e-5)
    print(name, "ok", flush=True)
