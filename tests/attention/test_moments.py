import pytest
import torch

from locater.attention import MomentsCollector, rank
from locater.errors import Refusal

LAGS = (0, 1, 3)


def texts(*, dtype=torch.float64, mean=5.0):
    """Tokens that remember the one before, and the token before that a little."""
    noise = torch.randn(4, 40, 6, dtype=torch.float64)
    x = noise.clone()
    x[:, 1:] += noise[:, :-1] @ torch.randn(6, 6, dtype=torch.float64)
    return (x + mean).to(dtype)


def by_definition(x, lag, *, paired=None):
    """The mean over pairs of tokens of the outer product of what is left without the mean, pair by pair."""
    mean = x.reshape(-1, x.shape[-1]).mean(0) if paired is None else x[paired[0]].mean(0)
    pairs = [
        torch.outer(x[text, t] - mean, x[text, t - lag] - mean)
        for text in range(len(x))
        for t in range(lag, x.shape[1])
        if paired is None or paired[1](text, t, t - lag)
    ]
    return mean, torch.stack(pairs).mean(0), len(pairs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_moments_over_several_batches_are_those_of_the_definition(dtype):
    x = texts(dtype=dtype)
    collector = MomentsCollector(lags=LAGS)
    for part in (x[:1], x[1:2], x[2:]):
        collector.add(part)
    found = collector.moments()
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    for index, lag in enumerate(LAGS):
        mean, expected, count = by_definition(x.double(), lag)
        assert found.counts[index] == count
        torch.testing.assert_close(found.mean, mean, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(found.lagged(lag), expected, atol=tolerance, rtol=tolerance)
    query, key = torch.randn(2, 3, 6, dtype=torch.float64)
    torch.testing.assert_close(found.between(query, key, 3), query @ found.lagged(3) @ key.T)


def test_a_large_mean_does_not_drown_the_covariance():
    x = texts(mean=0.0)
    plain, far = (MomentsCollector(lags=(2,)) for _ in range(2))
    plain.add(x.float())
    far.add((x + 4096.0).float())
    torch.testing.assert_close(far.moments().lagged(2), plain.moments().lagged(2), atol=2e-3, rtol=2e-3)


def test_padding_makes_no_pairs():
    x = texts()
    valid = torch.ones(4, 40, dtype=torch.bool)
    valid[1, 30:] = False
    collector = MomentsCollector(lags=LAGS)
    collector.add(x.masked_fill(~valid[..., None], 1e6), valid=valid)

    def pairs(text, t, before):
        return bool(valid[text, t] & valid[text, before])

    for lag in LAGS:
        mean, expected, _ = by_definition(x, lag, paired=(valid, pairs))
        torch.testing.assert_close(collector.moments().mean, mean)
        torch.testing.assert_close(collector.moments().lagged(lag), expected)


def test_skipped_tokens_do_not_count():
    x = texts()
    skipping, cut = MomentsCollector(lags=(1,), skip=2), MomentsCollector(lags=(1,))
    skipping.add(x)
    cut.add(x[:, 2:])
    torch.testing.assert_close(skipping.moments().lagged(1), cut.moments().lagged(1))


def test_low_rank_moments_are_exact_within_their_basis_and_keep_the_variance_outside():
    basis = torch.linalg.qr(torch.randn(6, 3, dtype=torch.float64)).Q
    x = texts() @ basis @ basis.T
    whole, low = MomentsCollector(lags=LAGS), MomentsCollector(lags=LAGS, rank=3)
    for collector in (whole, low):
        collector.add(x)
    for lag in LAGS:
        torch.testing.assert_close(low.moments().lagged(lag), whole.moments().lagged(lag))
        query, key = torch.randn(2, 3, 6, dtype=torch.float64)
        torch.testing.assert_close(low.moments().between(query, key, lag), whole.moments().between(query, key, lag))
    rough = MomentsCollector(rank=2)
    full = texts()
    rough.add(full)
    dense = MomentsCollector()
    dense.add(full)
    torch.testing.assert_close(rough.moments().lagged().trace(), dense.moments().lagged().trace())


def test_what_cannot_be_collected_is_said():
    with pytest.raises(Refusal, match="more than 5 tokens"):
        MomentsCollector(lags=(5,)).moments()
    with pytest.raises(Refusal, match="first batch of more than 4 tokens, got 3"):
        MomentsCollector(rank=4).add(torch.randn(1, 3, 6))
    collector = MomentsCollector(lags=(1,))
    collector.add(texts())
    with pytest.raises(Refusal, match="a lag among 0, 1, got 2"):
        collector.moments().lagged(2)


def test_rank_measures_by_their_definitions():
    x = torch.randn(2, 9, 5, dtype=torch.float64) + 1
    found = rank(x)
    for text in range(2):
        own = x[text]
        singular = torch.linalg.svdvals(own)
        share = singular / singular.sum()
        cosine = torch.nn.functional.cosine_similarity(own[:, None], own[None], dim=-1)
        expected = {
            "residual": (own - own.mean(0)).norm() / own.norm(),
            "mean_cosine": (cosine.sum() - 9) / 72,
            "stable_rank": own.norm().square() / singular[0].square(),
            "effective_rank": torch.exp(-(share * share.log()).sum()),
        }
        for name, value in expected.items():
            torch.testing.assert_close(getattr(found, name)[text], value)


def test_rank_ignores_padding_and_thins_long_texts_evenly():
    x = torch.randn(2, 12, 5, dtype=torch.float64)
    valid = torch.ones(2, 12, dtype=torch.bool)
    valid[1, :5] = False
    found, alone = rank(x, valid=valid, most=7), rank(x[1:, 5:])
    for name in vars(found):
        torch.testing.assert_close(getattr(found, name)[1:], getattr(alone, name))
    spaced = rank(x[:1, torch.arange(7) * 12 // 7])
    torch.testing.assert_close(found.effective_rank[:1], spaced.effective_rank)
    same = rank(torch.ones(1, 8, 5, dtype=torch.float64))
    assert same.residual < 1e-12 and abs(same.mean_cosine - 1) < 1e-12 and abs(same.effective_rank - 1) < 1e-6


def test_rank_of_a_text_that_exploded_is_no_number_and_others_keep_theirs():
    x = torch.randn(3, 8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    alone = vars(rank(x[:1]))
    x[1, 2, 3], x[2, 0, 0] = torch.nan, torch.inf
    for name, values in vars(rank(x)).items():
        assert values[1:].isnan().all(), name
        torch.testing.assert_close(values[:1], alone[name])
