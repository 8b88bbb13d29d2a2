import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from locater.spectra import Moments
from locater.theory import REGIMES, classify, classify_all, closed_form, localisation
from locater.theory.regimes import END, FLAT, LOW, NO_SIGNAL

pytestmark = pytest.mark.quick

LENGTH = 1000


def symmetric(trace: float, eta: float, *, length: int = LENGTH):
    """The profile of a symmetric head at temperature 1, from its trace and its scale."""
    one = torch.tensor(1.0, dtype=torch.float64)
    found = Moments(trace * one, eta**2 * one, eta**2 * one, d_model=64, d_head=64)
    return closed_form.from_moments(found, length=length, temperature=1.0)


@pytest.mark.parametrize(
    ("trace", "eta", "word"),
    [
        (0.0, 1e-5, "uniform"),
        (0.0, 0.1, "uniform"),
        (0.0, 100.0, "no-signal"),
        (1.0, 0.1, "late"),
        (1.9, 0.05, "late"),
        (2.4, 0.05, "middle"),
        (20.0, 0.1, "middle"),
        (-1.0, 0.1, "early"),
        (-1.9, 0.05, "early"),
        (-2.4, 0.05, "middle"),
        (-20.0, 0.1, "middle"),
    ],
)
def test_the_theory_gives_its_words(trace, eta, word):
    assert classify(symmetric(trace, eta)) == word


@pytest.mark.parametrize("eta", [10.0**exponent for exponent in range(-5, 1)])
def test_a_head_of_mean_zero_is_never_localized(eta):
    assert classify(symmetric(0.0, eta)) in ("uniform", "mixed", "no-signal")


def test_a_dip_is_mixed():
    assert classify(torch.cat([torch.ones(30), torch.zeros(40), torch.ones(30)])) == "mixed"


def test_a_mirrored_profile_has_the_mirrored_word():
    mirrored = {"late": "early", "early": "late"}
    for trace in (-3.0, -1.0, -0.1, 0.0, 0.1, 1.0, 3.0):
        profile = symmetric(trace, 0.3)
        word = classify(profile)
        assert classify(profile.flip(0)) == mirrored.get(word, word)


def test_thresholds_are_the_named_ones():
    assert classify(torch.full((50,), NO_SIGNAL * 0.99)) == "no-signal"
    assert classify(torch.full((50,), NO_SIGNAL * 1.01)) == "uniform"
    sides = torch.ones(100)
    size = round(END * 100)
    for start, word in ((FLAT * 1.01, "uniform"), (FLAT * 0.99, "mixed"), (LOW * 1.01, "mixed"), (LOW * 0.99, "late")):
        assert classify(torch.cat([torch.full((size,), start), sides])) == word


def test_batches_are_classified_in_order():
    profiles = torch.stack([symmetric(trace, 0.1) for trace in (-1.0, 0.0, 1.0, 20.0)])
    assert classify_all(profiles.reshape(2, 2, LENGTH)) == ["early", "uniform", "late", "middle"]
    assert set(classify_all(profiles)) <= set(REGIMES)


@pytest.mark.parametrize("length", [1, 2])
def test_the_shortest_contexts_have_words_and_indices(length):
    profile = symmetric(1.0, 0.5, length=length)
    assert classify(profile) in REGIMES
    assert 0 <= localisation(profile) <= 1
    assert classify(symmetric(1.0, 0.5, length=1)) == "no-signal"


@given(window=st.integers(1, 200), start=st.integers(0, 100), height=st.floats(1e-6, 1))
def test_localisation_is_the_share_left_out(window, start, height):
    profile = torch.zeros(300, dtype=torch.float64)
    profile[start : start + window] = height
    assert localisation(profile) == pytest.approx(1 - (window - 1) / 299)


def test_localisation_has_its_ends():
    assert localisation(torch.full((50,), 0.3, dtype=torch.float64)) == pytest.approx(0, abs=1e-12)
    assert localisation(torch.eye(50, dtype=torch.float64)[3]) == pytest.approx(1)
    assert localisation(torch.zeros(50)) == 0
    assert localisation(torch.ones(1)) == 0
    assert localisation(torch.stack([torch.ones(9), torch.eye(9)[0]])).tolist() == pytest.approx([0, 1], abs=1e-6)


def test_localisation_of_a_window_does_not_depend_on_the_length():
    short, long = (localisation(symmetric(8.0, 0.05, length=length)) for length in (1000, 16_000))
    assert short == pytest.approx(float(long), abs=0.01)
