"""ρ over Gaussian tokens with a mean and lags: the closed form against drawn texts whose keys are turned one by one."""

import math
import sys
from pathlib import Path

import pytest
import torch

from locater.errors import Refusal
from locater.theory.random_walk import Turns

sys.path.append(str(Path(__file__).parents[2] / "bench"))
import gaussian_tokens
from gaussian_tokens import HeadInputs

LENGTH, WIDTH, D_HEAD = 12, 10, 6
PAIRS = torch.tensor([[0, 3], [1, 4]])
TURNS = Turns(PAIRS, torch.tensor([0.7, 0.09]), amplitude=1.2)


class Texts:
    """x_t = m + y_t with y_t = F y_{t−1} + noise, stationary: Γ(Δ) = F^Δ Γ(0)."""

    def __init__(self, seed=0):
        draws = torch.Generator().manual_seed(seed)
        options = dict(generator=draws, dtype=torch.float64)
        self.mean = torch.randn(WIDTH, **options)
        turn = torch.linalg.qr(torch.randn(WIDTH, WIDTH, **options)).Q
        self.forward = 0.8 * turn
        root = torch.randn(WIDTH, WIDTH, **options) / math.sqrt(WIDTH)
        self.noise = root
        self.covariance = sum(
            torch.linalg.matrix_power(self.forward, n) @ root @ root.T @ torch.linalg.matrix_power(self.forward, n).T
            for n in range(200)
        )
        self.query, self.key = 0.5 * torch.randn(2, D_HEAD, WIDTH, **options)
        self.query_bias, self.key_bias = torch.randn(2, D_HEAD, **options)
        self.draws = draws

    def lagged(self, lag):
        return torch.linalg.matrix_power(self.forward, lag) @ self.covariance

    def inputs(self):
        lags = torch.stack([self.lagged(lag) for lag in range(LENGTH)])
        return HeadInputs(
            self.query @ self.mean + self.query_bias,
            self.key @ self.mean + self.key_bias,
            self.query @ self.covariance @ self.query.T,
            self.key @ lags @ self.key.T,
            self.query @ lags @ self.key.T,
        )

    def centred_logits(self, count, turns):
        """λ(ω_t − ω̄) of drawn texts."""
        normal = torch.randn(count, 60 + LENGTH, WIDTH, generator=self.draws, dtype=torch.float64) @ self.noise.T
        y = torch.zeros(count, WIDTH, dtype=torch.float64)
        tokens = []
        for step in normal.unbind(1):
            y = y @ self.forward.T + step
            tokens.append(y + self.mean)
        x = torch.stack(tokens[-LENGTH:], 1)
        queries, keys = x @ self.query.T + self.query_bias, x @ self.key.T + self.key_bias
        if turns is not None:
            for t in range(LENGTH):
                for (i, j), frequency in zip(turns.pairs.tolist(), turns.frequencies.tolist(), strict=True):
                    for part in (queries, keys):
                        first, second, angle = part[:, t, i].clone(), part[:, t, j].clone(), frequency * t
                        part[:, t, i] = turns.amplitude * (first * math.cos(angle) - second * math.sin(angle))
                        part[:, t, j] = turns.amplitude * (first * math.sin(angle) + second * math.cos(angle))
        logits = (keys @ queries[:, -1, :, None])[..., 0]
        return logits - logits.mean(-1, keepdim=True)


@pytest.mark.parametrize("turns", [None, TURNS], ids=["plain", "rotary"])
@pytest.mark.parametrize("seed", [0, 1])
def test_moments_are_those_of_drawn_texts(turns, seed):
    texts, count = Texts(seed), 8000
    drawn = texts.centred_logits(count, turns)
    found = gaussian_tokens.logit_moments(texts.inputs(), turns)
    error = drawn.std(0) / math.sqrt(count)
    assert bool(((found.mean - drawn.mean(0)).abs() <= 4.5 * error).all())
    assert found.variance.tolist() == pytest.approx(drawn.var(0).tolist(), rel=0.12)


def test_profile_and_attention_are_near_those_of_drawn_texts():
    """The logit is taken as Gaussian here: at six rows that costs a few hundredths."""
    texts, scale = Texts(3), 8.0
    drawn = texts.centred_logits(4000, TURNS) / scale
    rho = ((drawn > -1) & (drawn < LENGTH - 1)).double().mean(0)
    clipped = ((1 + drawn) / LENGTH).clamp(0, 1).mean(0)
    assert gaussian_tokens.profile(texts.inputs(), temperature=scale, turns=TURNS).tolist() == pytest.approx(
        rho.tolist(), abs=0.07
    )
    expected = gaussian_tokens.expected_attention(texts.inputs(), temperature=scale, turns=TURNS)
    assert expected.tolist() == pytest.approx(clipped.tolist(), abs=0.04)


def test_attention_of_gaussian_logits_is_exact():
    """One query direction that does not vary: the logits are Gaussian themselves."""
    texts = Texts(4)
    plain = texts.inputs()._replace(
        query_covariance=torch.zeros(D_HEAD, D_HEAD, dtype=torch.float64),
        crossed=torch.zeros_like(texts.inputs().crossed),
    )
    mean, variance = gaussian_tokens.logit_moments(plain)
    z = mean + variance.sqrt() * torch.randn(50_000, LENGTH, generator=texts.draws, dtype=torch.float64)
    clipped = ((1 + z / 3) / LENGTH).clamp(0, 1).mean(0)
    found = gaussian_tokens.expected_attention(plain, temperature=3.0)
    assert found.tolist() == pytest.approx(clipped.tolist(), abs=5e-3)


def test_equal_tokens_pass_on_their_signal_always():
    silent = HeadInputs(*(torch.zeros_like(part) for part in Texts().inputs()))
    assert gaussian_tokens.profile(silent).tolist() == [1.0] * LENGTH
    assert gaussian_tokens.expected_attention(silent).tolist() == pytest.approx([1 / LENGTH] * LENGTH)


def test_what_has_no_answer_is_refused():
    inputs = Texts().inputs()
    with pytest.raises(Refusal, match="two tokens"):
        gaussian_tokens.profile(inputs._replace(keys=inputs.keys[:1], crossed=inputs.crossed[:1]))
    with pytest.raises(Refusal, match="finite means"):
        gaussian_tokens.profile(inputs._replace(key_mean=inputs.key_mean * math.nan))
