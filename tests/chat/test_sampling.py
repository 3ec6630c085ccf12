"""Sampling: tables by hand, the slow twin, and frequencies under a fixed seed."""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.chat.sampling import Sampler, Sampling
from headwater.chat.session import Chat
from headwater.engines.fake import FakeEngine
from headwater.errors import UnsupportedModel, UsageError
from tests.reference import sampling as twin

OFF: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}


def logits(*probabilities: float) -> np.ndarray:
    return np.log(np.array(probabilities)).astype(np.float32)


def drawn(values: np.ndarray, context: list[int] | None = None, draws: int = 4000, **knobs: Any) -> np.ndarray:
    """How often each token was drawn."""
    sampler = Sampler(Sampling(**{**OFF, "seed": 5, **knobs}))
    found = [sampler.draw(values, context or []) for _ in range(draws)]
    return np.bincount(found, minlength=len(values)) / draws


@pytest.mark.parametrize(
    ("knobs", "allowed"),
    [
        ({}, [0, 1, 2, 3]),  # everything off
        ({"top_k": 2}, [0, 1]),
        ({"top_k": 9}, [0, 1, 2, 3]),  # more than there are
        ({"top_p": 0.4}, [0]),  # 0.4 is reached by the first alone
        ({"top_p": 0.41}, [0, 1]),
        ({"top_p": 0.95}, [0, 1, 2, 3]),
        ({"min_p": 0.51}, [0, 1]),  # at least 0.204
        ({"min_p": 0.49}, [0, 1, 2]),
        ({"min_p": 0.76}, [0]),
        ({"min_p": 1.0}, [0]),
        ({"temperature": 0.001}, [0]),
        ({"temperature": 0.0}, [0]),
        ({"top_k": 2, "top_p": 0.57}, [0]),  # after top-k the first has 4/7 = 0.571
        ({"top_k": 2, "top_p": 0.58}, [0, 1]),
    ],
)
def test_which_tokens_may_be_drawn(knobs: dict[str, Any], allowed: list[int]):
    frequencies = drawn(logits(0.4, 0.3, 0.2, 0.1), **knobs)
    assert np.flatnonzero(frequencies).tolist() == allowed


def test_frequencies_are_the_probabilities():
    expected = np.array([0.4, 0.3, 0.2, 0.1])
    found = drawn(logits(*expected), draws=20_000)
    assert np.abs(found - expected).max() < 4 * np.sqrt(0.25 / 20_000)


def test_temperature_sharpens():
    expected = np.array([0.4, 0.3, 0.2, 0.1]) ** 2
    found = drawn(logits(0.4, 0.3, 0.2, 0.1), temperature=0.5, draws=20_000)
    assert np.abs(found - expected / expected.sum()).max() < 4 * np.sqrt(0.25 / 20_000)


def test_greedy_takes_the_lowest_id_of_equals():
    assert Sampler(Sampling(temperature=0)).draw(np.array([1, 3, 3, 2], dtype=np.float32)) == 1


def test_ties_with_the_last_one_kept_are_kept():
    frequencies = drawn(logits(0.4, 0.2, 0.2, 0.2), top_k=2)
    assert np.flatnonzero(frequencies).tolist() == [0, 1, 2, 3]


def test_the_penalty_divides_what_is_positive_and_multiplies_what_is_negative():
    greedy = Sampler(Sampling(temperature=0, repetition_penalty=2.0))
    assert greedy.draw(np.array([3, 2, -1], dtype=np.float32), [0, 0]) == 1  # 3 / 2 < 2
    assert greedy.draw(np.array([-1.0, -1.5], dtype=np.float32), [0]) == 1  # -1 * 2 < -1.5
    assert greedy.draw(np.array([3, 2, -1], dtype=np.float32), []) == 0


def test_the_logits_of_the_caller_stay_as_they_are():
    values = logits(0.4, 0.3, 0.2, 0.1)
    before = values.copy()
    Sampler(Sampling(**{**OFF, "top_k": 3, "top_p": 0.9, "repetition_penalty": 1.3, "seed": 1})).draw(values, [0, 1])
    assert np.array_equal(values, before)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(-12, 12, width=32), min_size=1, max_size=40, unique=True),
    st.floats(0.1, 3.0),
    st.integers(0, 45),
    st.floats(0.05, 1.0),
    st.floats(0.0, 1.0),
    st.floats(0.7, 1.6),
    st.integers(0, 1000),
)
def test_draws_equal_the_slow_twin(values, temperature, top_k, top_p, min_p, penalty, seed):
    array = np.array(values, dtype=np.float32)
    context = [index for index in range(len(values)) if (seed + index) % 3 == 0]
    sampling = Sampling(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=penalty, seed=seed
    )
    sampler, uniform = Sampler(sampling), np.random.default_rng(seed)
    expected = twin.distribution(values, context, sampling)
    for _ in range(5):
        got, wanted = sampler.draw(array, context), twin.draw(values, context, sampling, uniform.random())
        # Rounding may move a draw that falls on the border of two tokens, or a threshold that a token lies on.
        assert got == wanted or _borderline(array, context, sampling, expected)


def _borderline(array: np.ndarray, context: list[int], sampling: Sampling, expected: dict[int, float]) -> bool:
    nudged = [twin.distribution((array * (1 + sign * 1e-6)).tolist(), context, sampling).keys() for sign in (-1, 1)]
    looser = Sampling(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=min(1.0, sampling.top_p * (1 + 1e-5)),
        min_p=sampling.min_p * (1 - 1e-5),
        repetition_penalty=sampling.repetition_penalty,
    )
    return any(keys != expected.keys() for keys in [*nudged, twin.distribution(array.tolist(), context, looser).keys()])


def test_a_large_vocabulary_is_cut_like_a_small_one():
    """49,152 tokens: the sets found among the likely tokens are those of the slow twin."""
    values = (np.random.default_rng(3).normal(size=49_152) * 3).astype(np.float32)
    for knobs in ({"top_k": 50}, {"top_p": 0.9}, {"top_p": 0.9999}, {"top_k": 5000, "top_p": 0.8, "min_p": 0.01}):
        sampling = Sampling(**{**OFF, **knobs, "seed": 9})
        chosen = twin.distribution(values.tolist(), [], sampling)
        sampler = Sampler(sampling)
        assert {sampler.draw(values) for _ in range(300)} <= chosen.keys()


@pytest.mark.parametrize("knobs", [{"top_p": 0.9}, {"top_k": 1500}])
def test_the_search_among_likely_tokens_goes_on_while_they_are_not_enough(knobs: dict[str, Any]):
    """One likely token, and most of the probability in two thousand unlikely ones."""
    values = np.full(2001, -6.0, dtype=np.float32)
    values[0] = 0
    frequencies = drawn(values, **knobs)
    assert abs(frequencies[0] - 1 / (1 + 2000 * np.exp(-6))) < 0.03
    assert np.count_nonzero(frequencies) > 1000


def test_the_same_seed_draws_the_same():
    values = (np.random.default_rng(3).normal(size=500)).astype(np.float32)
    one, two, other = (Sampler(Sampling(seed=seed)) for seed in (1, 1, 2))
    first, second, third = ([sampler.draw(values) for _ in range(50)] for sampler in (one, two, other))
    assert first == second != third


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"temperature": -1}, "temperature must be 0"),
        ({"temperature": 1e-9}, "at least 0.001"),
        ({"temperature": float("nan")}, "finite number, got nan"),
        ({"temperature": "hot"}, "finite number, got 'hot'"),
        ({"top_k": -1}, "top_k must be an integer of at least 0, got -1"),
        ({"top_k": 1.5}, "top_k must be an integer"),
        ({"top_p": 0}, "top_p must be above 0"),
        ({"top_p": 1.1}, "at most 1"),
        ({"min_p": 2}, "min_p must be between 0"),
        ({"repetition_penalty": 0}, "repetition_penalty must be above 0"),
        ({"seed": -1}, "seed must be an integer"),
        ({"seed": True}, "seed must be an integer"),
    ],
)
def test_values_outside_their_range_are_refused(knobs: dict[str, Any], words: str):
    with pytest.raises(UsageError, match=words):
        Sampling(**knobs)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_are_an_error(bad: float):
    for temperature in (0, 1):
        with pytest.raises(UnsupportedModel, match="largest logit"):
            Sampler(Sampling(temperature=temperature)).draw(np.array([1, bad, 0], dtype=np.float32))


class Broken(FakeEngine):
    """A model whose predictions are no numbers from the fourth step on."""

    def open(self, *given: Any, **named: Any) -> Any:
        stream, steps = super().open(*given, **named), itertools.count()
        plain = stream.feed
        stream.feed = lambda tokens: plain(tokens) * (np.nan if next(steps) >= 3 else 1)
        return stream


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_chat_says_that_its_model_predicts_no_numbers_and_goes_no_further(temperature: float):
    """The largest of logits that are no numbers is the first one, whatever token that is."""
    chat = Chat.open(Broken(answer_tokens=None), budget=200, sampling=Sampling(temperature=temperature), max_tokens=9)
    pieces: list[str] = []
    with pytest.raises(UnsupportedModel, match="largest logit is nan; try another dtype"):
        pieces.extend(iter(chat.send("hi")))
    assert 1 <= len(pieces) <= 3
    assert chat.messages[-1] == {"role": "assistant", "content": "".join(pieces)}


def test_impossible_tokens_are_never_drawn():
    values = np.array([-np.inf, 0.0, -np.inf], dtype=np.float32)
    assert drawn(values, draws=50).tolist() == [0, 1, 0]


def test_a_draw_takes_less_than_a_few_milliseconds_on_a_large_vocabulary():
    """About 0.1 ms on an idle core; the bound leaves room for a busy machine."""
    values = (np.random.default_rng(3).normal(size=49_152) * 3).astype(np.float32)
    sampler, best = Sampler(Sampling(top_k=50, top_p=0.9, min_p=0.05, repetition_penalty=1.1)), 1.0
    for _ in range(50):
        start = time.perf_counter()
        sampler.draw(values, range(1000))
        best = min(best, time.perf_counter() - start)
    assert best < 0.003
