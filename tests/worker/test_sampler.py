"""The sampler: a row's token is a function of its own logits, parameters and position alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tests.helpers.draws import draw_by_torch
from worker.sampling import torch_sampling
from worker.sampling.sampler import default_params

VOCAB = 1500


def _params(**values: Any) -> npt.NDArray[np.void]:
    """One record."""
    params = default_params(1)
    for name, value in values.items():
        params[name] = value
    return params


MANY = [
    _params(),
    _params(temperature=1.0, seed=1),
    _params(temperature=0.7, seed=2, top_k=5),
    _params(temperature=1.3, seed=3, top_p=0.8),
    _params(temperature=1.0, seed=4, min_p=0.1),
    _params(temperature=2.0, seed=-5, top_k=40, top_p=0.9, min_p=0.01),
    _params(temperature=5.0, seed=2**62, top_p=0.999),
]


def _logits(num_rows: int, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return 3 * torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed))


def _tokens(logits: torch.Tensor, params: npt.NDArray[np.void], positions: list[int]) -> list[int]:
    return draw_by_torch(logits, params, np.array(positions))[0]


def _draws(logits: torch.Tensor, count: int, **values: Any) -> npt.NDArray[np.int64]:
    """Counts of each token over `count` positions of one request."""
    drawn = _tokens(logits.expand(count, -1), np.repeat(_params(**values), count), list(range(count)))
    return np.bincount(drawn, minlength=len(logits))


def _chi_square(counts: npt.NDArray[np.int64], expected: npt.NDArray[np.float64]) -> float:
    """Statistic over its degrees of freedom; about 1 when the counts come from `expected`."""
    used = expected > 0
    assert counts[~used].sum() == 0, "a token of probability zero was drawn"
    scaled = expected[used] * counts.sum()
    return float(((counts[used] - scaled) ** 2 / scaled).sum() / (used.sum() - 1))


def test_greedy_takes_the_largest_logit_and_the_smallest_id_of_equal_ones() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, -1.0], [5.0, 5.0, 5.0, 5.0]])
    assert _tokens(logits, default_params(2), [0, 0]) == [1, 0]


def test_a_row_alone_gets_the_token_it_gets_in_any_batch() -> None:
    logits = _logits(len(MANY))
    positions = [7, 900, 3, 12, 5, 77, 1]
    together = _tokens(logits, np.concatenate(MANY), positions)
    alone = [_tokens(logits[i : i + 1], MANY[i], positions[i : i + 1])[0] for i in range(len(MANY))]
    assert together == alone
    # Other neighbours, another order, another place in memory.
    order = [5, 2, 6, 0, 3, 1, 4]
    shuffled = _tokens(logits[order], np.concatenate([MANY[i] for i in order]), [positions[i] for i in order])
    assert shuffled == [together[i] for i in order]


def test_seed_position_and_nothing_else_choose_the_noise() -> None:
    logits = torch.zeros(1, VOCAB)
    first = [_tokens(logits, _params(temperature=1.0, seed=1), [p])[0] for p in range(40)]
    assert first == [_tokens(logits, _params(temperature=1.0, seed=1), [p])[0] for p in range(40)]
    other_seed = [_tokens(logits, _params(temperature=1.0, seed=2), [p])[0] for p in range(40)]
    assert sum(a == b for a, b in zip(first, other_seed, strict=True)) < 4
    assert len(set(first)) > 30
    # Neither temperature nor a filter that allows everything changes it.
    for same in ({"temperature": 3.0}, {"temperature": 1.0, "top_k": VOCAB}, {"temperature": 1.0, "min_p": 1e-9}):
        assert first == [_tokens(logits, _params(seed=1, **same), [p])[0] for p in range(40)]


_PINNED = {(0, 0): 12307, (0, 1): 34520, (1, 0): 13563, (-1, 5): 41518, (4611686018427387904, 8191): 34639}


def test_the_noise_is_pinned() -> None:
    # A change here changes every seeded answer there is.
    drawn = [_tokens(torch.zeros(1, 50000), _params(temperature=1.0, seed=s), [p])[0] for s, p in _PINNED]
    assert drawn == list(_PINNED.values())


@pytest.mark.parametrize(
    ("values", "allowed"),
    [
        ({"temperature": 1.0}, lambda p: p),
        ({"temperature": 2.0}, lambda p: p**0.5),
        ({"temperature": 1.0, "top_k": 3}, lambda p: np.where(p >= np.sort(p)[-3], p, 0)),
        ({"temperature": 1.0, "min_p": 0.2}, lambda p: np.where(p >= 0.2 * p.max(), p, 0)),
        # 0.4, 0.7 and 0.85 are the running sums: 0.75 needs three.
        ({"temperature": 1.0, "top_p": 0.75}, lambda p: np.where(p >= 0.15 - 1e-6, p, 0)),
        ({"temperature": 1.0, "top_p": 0.3}, lambda p: np.where(p >= 0.4 - 1e-6, p, 0)),
        # Of the two that top-k leaves, 0.4 / 0.7 of the mass is enough for 0.5.
        ({"temperature": 1.0, "top_k": 2, "top_p": 0.5}, lambda p: np.where(p >= 0.4 - 1e-6, p, 0)),
        ({"temperature": 1.0, "top_p": 1e-6}, lambda p: np.where(p >= 0.4 - 1e-6, p, 0)),
    ],
)
def test_draws_follow_the_filtered_distribution(values: dict[str, Any], allowed: Any) -> None:
    probabilities = np.array([0.1, 0.4, 0.15, 0.05, 0.3])
    expected = allowed(probabilities)
    expected = expected / expected.sum()
    counts = _draws(torch.tensor(probabilities).log().float(), 2000, seed=11, **values)
    if (expected > 0).sum() == 1:
        assert counts[expected.argmax()] == counts.sum()
    else:
        # 4 degrees of freedom at most: 5 is beyond the 99.9th percentile of each.
        assert _chi_square(counts, expected) < 5 if (expected > 0).sum() > 2 else _chi_square(counts, expected) < 11


def test_draws_over_a_large_vocabulary_are_uniform_where_logits_are_equal() -> None:
    counts = _draws(torch.zeros(64), 6400, temperature=1.0, seed=5)
    assert 0.5 < _chi_square(counts, np.full(64, 1 / 64)) < 1.6


def test_tokens_that_tie_with_the_last_allowed_one_stay_allowed() -> None:
    logits = torch.tensor([1.0, 2.0, 1.0, 1.0, 0.0])
    assert (_draws(logits, 300, temperature=5.0, seed=1, top_k=2) > 0).tolist() == [True, True, True, True, False]


def test_top_p_does_not_depend_on_the_number_of_threads() -> None:
    """For a share at which torch's sums of 1, 2 and 4 threads would end the set at different tokens."""
    num_threads, num_shares = torch.get_num_threads(), 0
    try:
        for seed in range(8):
            scores, sums = torch.randn(50_000, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)), []
            weights = (scores - scores.max()).exp()
            for count in (1, 2, 4):
                torch.set_num_threads(count)
                sums.append(float(weights.sum()))
            mass = weights.sort(descending=True).values.cumsum(0)[100:45_000]
            shares = mass / min(sums)
            between = (shares * min(sums) <= mass) & (mass < shares * max(sums))
            for share in shares[between][:1].tolist():
                found = set()
                for count in (1, 2, 4):
                    torch.set_num_threads(count)
                    found.add(float(torch_sampling._top_p_threshold(scores, None, share)))
                assert len(found) == 1, (seed, share)
                num_shares += 1
    finally:
        torch.set_num_threads(num_threads)
    assert num_shares > 0, "no sum depends on the number of threads, so the test shows nothing"


def test_top_p_finds_the_same_threshold_with_and_without_a_full_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = _logits(1, seed=3, vocab=5000)[0].double()
    for top_p in (0.05, 0.5, 0.9, 0.999):
        quick = torch_sampling._top_p_threshold(scores, None, top_p)
        monkeypatch.setattr(torch_sampling, "_TOP_P_WIDTH", 0.5)
        assert torch.equal(torch_sampling._top_p_threshold(scores, None, top_p), quick)
        monkeypatch.undo()
        # The plain definition: the smallest set, likeliest first, whose mass reaches top_p.
        ordered = scores.softmax(0).sort(descending=True).values
        needed = int((ordered.cumsum(0) < top_p).sum()) + 1
        assert int((scores >= quick).sum()) == needed


def test_minus_infinity_is_never_drawn() -> None:
    logits = torch.full((100,), -math.inf)
    logits[[7, 50]] = torch.tensor([-1000.0, -1001.0])
    for filters in ({}, {"top_k": 40}, {"top_p": 0.999}, {"min_p": 1e-6}):
        counts = _draws(logits, 100, temperature=1.0, seed=9, **filters)
        assert counts[7] + counts[50] == 100
        assert counts[7] > 50


def test_logprobs_are_of_the_raw_distribution_for_rows_that_ask() -> None:
    logits = _logits(3, seed=8)
    params = np.concatenate(
        [
            _params(temperature=9.0, seed=1, top_k=100, num_logprobs=2),
            _params(temperature=1.0, seed=2),
            _params(num_logprobs=0),
        ]
    )
    tokens, result = draw_by_torch(logits, params, np.array([4, 4, 4]))
    expected = torch.log_softmax(logits, dim=-1)
    assert result is not None
    assert result.top_ids.shape == (2, 2)
    for i, row in enumerate([0, 2]):
        assert result.logprobs[i] == pytest.approx(float(expected[row, tokens[row]]), abs=1e-6)
        torch.testing.assert_close(result.top_logprobs[i], expected[row].topk(2).values)
        assert result.top_ids[i].tolist() == expected[row].topk(2).indices.tolist()


def test_likeliest_tokens_that_tie_are_listed_by_id() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 1.0, 1.0]])
    _, result = draw_by_torch(logits, _params(num_logprobs=3), np.array([0]))
    assert result is not None
    assert result.top_ids.tolist() == [[2, 1, 3]]


def test_no_row_asks_for_logprobs() -> None:
    assert draw_by_torch(_logits(2), default_params(2), np.array([0, 0]))[1] is None
