"""The offline bound: exhaustive search, a proof of optimality on real sizes, and no policy above it."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import Float32
from numpy.typing import NDArray

from headwater.errors import BudgetError, InputFileError, UnsupportedCall, UsageError
from headwater.policies import POLICIES, policy
from headwater.traces import ArrayTrace, Head, Replay, Trace, canonical_trace, replay_all
from headwater.traces.assignment import assign
from headwater.traces.oracle import Oracle, oracle, plan

Weights = Float32[np.ndarray, "steps positions"]


@st.composite
def small_rows(draw: st.DrawFn, most: int = 9) -> Weights:
    """One row of 1 to `most` tokens: eighths, so that sums are exact, with many zeros and ties."""
    tokens = draw(st.integers(1, most))
    steps = [draw(st.lists(st.integers(0, 4), min_size=t + 1, max_size=t + 1)) for t in range(1, tokens)]
    weights = np.zeros((tokens - 1, tokens), dtype=np.float32)
    for row, paid in zip(weights, steps, strict=True):
        row[: len(paid)] = paid
    return weights / 8


def searched(weights: Weights, budget: int) -> float:
    """The most mass that any eviction schedule retains: every kept set of every step, every choice of what goes.

    A schedule may let go of several at once, of the newest, and of some though all would fit.
    """
    best = {frozenset({0}): 0.0}
    for step, paid in enumerate(weights.tolist(), start=1):
        after = dict[frozenset[int], float]()
        for held, mass in best.items():
            total = mass + sum(paid[position] for position in held) + paid[step]
            for kept in subsets(sorted(held | {step}), budget):
                after[kept] = max(total, after.get(kept, 0.0))
        best = after
    return max(best.values())


def subsets(positions: list[int], most: int) -> list[frozenset[int]]:
    chosen = [frozenset[int]()]
    for position in positions:
        chosen += [each | {position} for each in chosen if len(each) < most]
    return chosen


def as_trace(*rows: Weights, heads: tuple[Head, ...] | None = None) -> ArrayTrace:
    """What lies above the diagonal is not a number: it must never be read."""
    whole = np.pad(np.stack(rows), ((0, 0), (1, 0), (0, 0)))
    whole[:, *np.triu_indices(whole.shape[1], 1)] = np.nan
    return ArrayTrace(whole, heads=heads)


def mass_of(weights: Weights, left: NDArray[np.int32]) -> float:
    """What a plan retains, straight from its definition."""
    return sum(
        float(paid[: step + 1][left[: step + 1] >= step].sum(dtype=np.float64))
        for step, paid in enumerate(weights, start=1)
    )


def peaked(tokens: int, seed: int) -> Weights:
    """A row like those of real heads: sinks, some heavy positions, and weights down to a billionth of them."""
    random = np.random.default_rng(seed)
    logits = random.normal(0, 3, (tokens, tokens)) + random.normal(0, 3, tokens)
    logits[:, :2] += 9
    logits[np.triu_indices(tokens, 1)] = -np.inf
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)[1:]


def cut(trace: Trace) -> Weights:
    return trace.whole()[0]


# What it is optimal for


@given(small_rows(), st.integers(1, 9))
@settings(max_examples=150)
def test_exhaustive_search_finds_nothing_better(weights: Weights, budget: int) -> None:
    found = oracle(as_trace(weights), budget)
    assert found.mass.sum() == (searched(weights, budget) if len(weights) else 0)
    assert (found.left == plan(weights, budget)).all()


@pytest.mark.parametrize("budget", [1, 4, 24, 100])
@pytest.mark.parametrize(
    "weights",
    [
        *(peaked(160, seed) for seed in range(6)),
        np.random.default_rng(0).random((139, 140), dtype=np.float32),
        np.full((139, 140), 1 / 3, dtype=np.float32),
        cut(canonical_trace(tokens=300)),
    ],
    ids=[*(f"peaked {seed}" for seed in range(6)), "noise", "ties", "canonical"],
)
def test_the_prices_prove_that_no_plan_loses_less(weights: Weights, budget: int) -> None:
    """Weak duality, for lengths where nothing can be searched: a plan that loses what the prices demand is the best.

    Rounding once led paths in circles on rows like the peaked ones.
    """
    tokens = weights.shape[1]
    paid = np.where(np.tri(tokens - 1, tokens), weights, 0).astype(np.float64)  # a token's own weight is never lost
    lost_after = np.cumsum(paid[::-1], axis=0)[::-1]
    costs = np.zeros((tokens - budget, tokens))
    costs[:-1] = lost_after[budget:]  # what step t and later ones pay, for an eviction after step t - 1
    _, price = assign(costs, budget)
    assert (price <= 0).all()
    least = sum((row[:end] - price[:end]).min() for end, row in enumerate(costs, start=budget + 1)) + price.sum()
    everything = mass_of(weights, np.full(tokens, tokens, dtype=np.int32))
    assert mass_of(weights, plan(weights, budget)) == pytest.approx(everything - least, abs=1e-9)


def test_letting_go_of_what_has_the_least_future_is_not_the_best() -> None:
    """At step 1 position 1 has the least to come (2 against 3), but position 0 would have to make room for 2 anyway."""
    weights = np.array([[0, 0, 0, 0], [0, 2, 0, 0], [3, 0, 4, 0]], dtype=np.float32)
    left = plan(weights, 1)
    assert left[:2].tolist() == [1, 2]
    assert mass_of(weights, left) == 2 + 4
    assert mass_of(weights, np.array([2, 1, 4, 3])) == 4


@given(st.data())
@settings(max_examples=60)
def test_no_policy_retains_more(data: st.DataObject) -> None:
    """Nor does one with sinks or another window: every policy of the registry, on every row."""
    tokens = data.draw(st.integers(2, 30), label="tokens")
    budget = data.draw(st.integers(1, tokens - 1), label="budget")
    sinks = data.draw(st.integers(0, budget - 1), label="sinks")
    random = np.random.default_rng(data.draw(st.integers(0, 2**32), label="seed"))
    trace = as_trace(*(random.dirichlet(np.full(tokens, 0.2), (3, tokens - 1)).astype(np.float32)))
    made = []
    for name, kind in POLICIES.items():
        if name == "full":
            continue
        given = {"sinks": sinks, "recent_window": data.draw(st.integers(0, budget - sinks - 1), label=name)}
        taken = {key: value for key, value in given.items() if key in kind.__dataclass_fields__}
        made.append(policy(name, budget=budget, **taken))
    bound = oracle(trace, budget).mass.sum(axis=1)
    for found in replay_all(trace, made):
        assert (found.mass.sum(axis=1) <= bound + 1e-9).all(), found.policy


def test_on_the_canonical_trace() -> None:
    """The local span, the sinks and the next heavy positions fit, and little else matters."""
    found = oracle(canonical_trace(), 256)
    assert (found.retained_attention_mass, found.heavy_hitter_recall) == (0.961786, 1.0)
    assert found.eviction_calls == 4096 - 256


# What comes back


def test_a_budget_that_all_fits_keeps_everything() -> None:
    weights = peaked(12, 0)
    for budget in (12, 13, 10_000):
        found = oracle(as_trace(weights), budget)
        assert (found.left == 12).all() and found.eviction_calls == 0
        assert found.mass.sum() == pytest.approx(mass_of(weights, found.left[0]))
    assert (oracle(as_trace(weights), 11).left < 12).sum() == 1


def test_one_position_leaves_with_every_step_once_the_budget_is_full() -> None:
    found = oracle(as_trace(peaked(40, 3)), 10)
    assert sorted(found.left[0][found.left[0] < 40]) == list(range(10, 40))
    assert [len(found.kept(step)) for step in range(40)] == [min(step + 1, 10) for step in range(40)]


def test_rows_are_planned_each_for_itself() -> None:
    heads = (Head(layer=0, head=4), Head(layer=0, head=7), Head(layer=3, head=1))
    rows = [peaked(50, seed) for seed in range(3)]
    trace, told = as_trace(*rows, heads=heads), list[int]()
    found = oracle(trace, 8, progress=told.append, chunk_bytes=5000)
    assert told == [1, 1, 1]
    for row, weights in enumerate(rows):
        assert (found.left[row] == plan(weights, 8)).all()
        assert found.mass[row].sum() == pytest.approx(mass_of(weights, found.left[row]))
    some = oracle(trace, 8, rows=(2, 0))
    assert (some.left == found.left[[0, 2]]).all() and (some.mass == found.mass[[0, 2]]).all()


def test_it_stands_in_a_replay_by_name_and_budget_and_decides_nothing() -> None:
    found = oracle(as_trace(peaked(20, 0)), 8)
    assert found.policy == Oracle(budget=8)
    assert (found.way, found.trace, found.tokens) == ("offline optimum", "array", 20)
    assert found.policy.needs == frozenset() and found.policy.state_bytes_per_slot == 0
    with pytest.raises(UnsupportedCall, match="oracle sees the attention to come"):
        replay_all(as_trace(peaked(20, 0)), [Oracle(budget=8)])


# Refusals


TRACE = as_trace(peaked(20, 0), peaked(20, 1))


def bad(value: float) -> Weights:
    weights = peaked(20, 1)
    weights[4, 2] = value
    return weights


REFUSED: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: oracle(TRACE, 0), BudgetError, "oracle: budget must be at least 1, got budget=0"),
    (lambda: plan(peaked(20, 0), True), BudgetError, "budget must be an integer, got budget=True"),
    (lambda: oracle(TRACE, 4, rows=(1, 2)), UsageError, "array has no row 2; its rows are 0 to 1"),
    (lambda: oracle(TRACE, 4, rows=(-1,)), UsageError, "array has no row -1"),
    (lambda: oracle(TRACE, 4, rows=(1, 1)), UsageError, r"a row is named twice in \[1, 1\]"),
    (lambda: oracle(TRACE, 4, rows=()), UsageError, "no row of array is named"),
    (lambda: plan(np.zeros((4, 4), dtype=np.float32), 2), UsageError, r"steps \+ 1\].* got \[4, 4\]"),
    (lambda: plan(np.zeros(5, dtype=np.float32), 2), UsageError, r"got \[5\]"),
    (lambda: plan(bad(-1.0), 4), InputFileError, r"position 2 is -1\.0 at row 0, step 5"),
    (lambda: oracle(as_trace(peaked(20, 0), bad(np.nan)), 4), InputFileError, "position 2 is nan at row 1, step 5"),
]


@pytest.mark.parametrize(("call", "kind", "said"), REFUSED, ids=[said for *_, said in REFUSED])
def test_what_cannot_be_planned_is_refused(call: Callable[[], Replay], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        call()


def test_without_numba_it_says_what_to_install() -> None:
    code = """
        import sys
        sys.modules["numba"] = None
        import headwater as hw
        from headwater.errors import MissingExtra
        from headwater.traces.oracle import oracle
        try:
            oracle(hw.canonical_trace(tokens=50), 8)
        except MissingExtra as error:
            print(error)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "numba is not installed; run: pip install 'headwater[lab]'\n"
