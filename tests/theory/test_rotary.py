import pytest
import torch
from test_spectra import FREQUENCIES, PAIRS, turn

from locater.errors import Refusal
from locater.theory import closed_form, monte_carlo
from locater.theory.random_walk import Turns
from theory_cases import construct

pytestmark = pytest.mark.quick


def brute_force(query, key, *, length: int, amplitude: float, temperature: float):
    """The profile from the matrices C_i themselves."""
    forms = [
        key.mT @ turn(length - s, d_head=query.shape[-2], amplitude=amplitude) @ query / temperature
        for s in range(1, length + 1)
    ]
    answer = []
    for position in range(1, length + 1):
        parts = [
            (step <= position) * forms[position - 1] - sum(forms[step - 1 :]) / length for step in range(1, length + 1)
        ]
        total = sum(parts)
        variance = length * sum(part.square().sum() for part in parts) + (total @ total).trace()
        answer.append(closed_form.mass_between(-1.0, length - 1.0, mean=total.trace(), variance=variance))
    return torch.stack(answer)


@pytest.mark.parametrize("kind", ["asymmetric", "symmetric", "negative"])
@pytest.mark.parametrize("d_head", [8, 9])
def test_the_profile_equals_that_of_dense_matrices(kind, d_head):
    query, key = construct(kind, d_head)
    settings = {"length": 11, "temperature": 1.7}
    found = closed_form.rotary_profile(query, key, turns=Turns(PAIRS, FREQUENCIES, 1.2), **settings)
    torch.testing.assert_close(found, brute_force(query, key, amplitude=1.2, **settings))


def test_without_turning_it_is_the_plain_profile():
    query, key = construct("asymmetric", 8)
    still = {"turns": Turns(PAIRS, torch.zeros(3)), "length": 20, "covariance": 1.5}
    plain = closed_form.profile(query, key, length=20, covariance=1.5)
    torch.testing.assert_close(closed_form.rotary_profile(query, key, **still), plain)
    walks = {"num_walks": 2000}
    turned = monte_carlo.profile(query, key, generator=torch.Generator().manual_seed(1), **walks, **still)
    straight = monte_carlo.profile(
        query, key, length=20, covariance=1.5, generator=torch.Generator().manual_seed(1), **walks
    )
    # The same walks, counted by another road.
    torch.testing.assert_close(turned.mean, straight.mean, atol=1 / 2000, rtol=0)


def test_without_pairs_nothing_turns():
    query, key = construct("asymmetric", 3)
    none = {"turns": Turns(torch.zeros(0, 2, dtype=torch.long), torch.zeros(0))}
    torch.testing.assert_close(
        closed_form.rotary_profile(query, key, length=9, **none), closed_form.profile(query, key, length=9)
    )


@pytest.mark.parametrize("kind", ["asymmetric", "symmetric", "negative"])
def test_simulation_agrees(kind):
    query, key = (weight.float() for weight in construct(kind, 64, scale=0.3))
    pairs = torch.arange(48).reshape(2, 24).mT
    settings = {"turns": Turns(pairs, 10.0 ** (-torch.arange(24) / 8), 1.1), "length": 48}
    found = closed_form.rotary_profile(query, key, **settings)
    generator = torch.Generator().manual_seed(4)
    simulated = monte_carlo.profile(query, key, num_walks=3000, generator=generator, **settings)
    # The second term is the Gaussian approximation's own error at this d_h.
    assert ((found - simulated.mean).abs() <= 4 * simulated.standard_error + 0.02).all()
    assert (closed_form.profile(query, key, length=48) - found).abs().max() > 0.04


def test_chosen_positions_and_batches_are_parts_of_the_whole(monkeypatch):
    heads = [construct("asymmetric", 8, seed=seed) for seed in range(4)]
    query = torch.stack([query for query, _ in heads]).reshape(2, 2, 8, -1)
    key = torch.stack([heads[0][1], heads[2][1]])[:, None]
    settings = {"turns": Turns(PAIRS, FREQUENCIES), "length": 30}
    whole = closed_form.rotary_profile(query, key, **settings)
    assert whole.shape == (2, 2, 30)
    torch.testing.assert_close(whole[1, 0], closed_form.rotary_profile(query[1, 0], key[1, 0], **settings))
    # One head at a time, where memory wants it so.
    monkeypatch.setattr(closed_form, "ENTRIES_AT_ONCE", 1)
    chosen = torch.tensor([1, 7, 30])
    torch.testing.assert_close(
        closed_form.rotary_profile(query, key, positions=chosen, **settings), whole[..., chosen - 1]
    )


def test_extremes_stay_probabilities():
    for scale in (0.0, 1e-100, 1e8):
        query, key = construct("asymmetric", 8, scale=scale)
        for length in (1, 2, 40):
            found = closed_form.rotary_profile(query, key, turns=Turns(PAIRS, FREQUENCIES), length=length)
            expected = 0.0 if length == 1 or scale > 1 else 1.0
            torch.testing.assert_close(found, torch.full_like(found, expected), atol=1e-6, rtol=0)


def test_positions_outside_the_context_are_refused():
    query, key = construct("asymmetric", 8)
    with pytest.raises(Refusal, match=r"positions from 1 to 5, got \[0, 2\]"):
        closed_form.rotary_profile(
            query, key, turns=Turns(PAIRS, FREQUENCIES), length=5, positions=torch.tensor([0, 2])
        )


def test_a_length_whose_sums_no_memory_holds_is_refused():
    with pytest.raises(Refusal, match="the sums over 2,147,483,648 tokens to fit"):
        closed_form.Series(2**31, torch.tensor([1]), Turns(torch.arange(256).reshape(128, 2), torch.rand(128)))
