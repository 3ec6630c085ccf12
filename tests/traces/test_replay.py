"""The harness: what it measures and when, what it hands back, and what it refuses."""

from __future__ import annotations

import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

import headwater as hw
from headwater.errors import BudgetError, InputFileError, PolicyFault, UnknownName, UsageError
from headwater.policies import POLICIES, Policy, SlidingWindow, Slots, policy
from headwater.traces import ArrayTrace, Chunk, Head, Trace, replay, replay_all
from headwater.traces.result import round6
from headwater.traces.trace import steps_per_chunk

HAND_MADE = [
    # what tokens 1 to 4 pay, their own weights last
    [0.5, 0.5, 0, 0, 0],
    [0.5, 0.25, 0.25, 0, 0],
    [0.125, 0.375, 0.25, 0.25, 0],
    [0.0625, 0.5, 0.125, 0.25, 0.0625],
]


def hand_made() -> ArrayTrace:
    return ArrayTrace(np.array([[1, 0, 0, 0, 0], *HAND_MADE]), name="hand made")


@pytest.mark.parametrize("by_rule", [False, True])
def test_mass_is_measured_before_the_eviction_and_with_the_steps_own_weight(by_rule: bool) -> None:
    """Budget 2. Step 1 holds 0; step 2 holds 0, 1; then 0 goes. Step 3 holds 1, 2; then 1 goes. Step 4 holds 2, 3."""
    out = replay_all(hand_made(), [policy("sliding-window", budget=2)], by_rule=by_rule)[0]
    assert out.mass.tolist() == [[0.5 + 0.5, 0.75 + 0.25, 0.625 + 0.25, 0.375 + 0.0625]]
    assert out.hits.tolist() == [[1, 2, 2, 2]]  # of 1, 2, 3 and 4 heavy hitters
    assert out.left.tolist() == [[2, 3, 4, 5, 5]]
    assert out.evictions.tolist() == [3]
    assert out.retained_attention_mass == round6((1 + 1 + 0.875 + 0.4375) / 4)
    assert out.heavy_hitter_recall == round6(7 / 10)


@pytest.mark.parametrize("by_rule", [False, True])
def test_a_policy_sees_the_weights_of_what_it_holds_and_not_the_steps_own(by_rule: bool) -> None:
    """tova at budget 2: step 2 shows 0.5 and 0.25, so 1 goes; step 3 shows 0 and 2 0.125 and 0.25, so 0 goes."""
    out = replay_all(hand_made(), [policy("tova", budget=2)], by_rule=by_rule)[0]
    assert out.left.tolist() == [[3, 2, 4, 5, 5]]
    assert out.mass.tolist() == [[1, 1, 0.125 + 0.25 + 0.25, 0.125 + 0.25 + 0.0625]]


def test_the_kept_set_of_every_step_is_in_the_result() -> None:
    out = replay(hand_made(), "sliding-window", budget=2)
    assert [out.kept(step).tolist() for step in range(5)] == [[0], [0, 1], [1, 2], [2, 3], [3, 4]]


def test_figures_are_over_all_rows_and_each() -> None:
    two = np.stack([np.array([[1, 0, 0, 0, 0], *HAND_MADE]), np.eye(5)])
    out = replay(ArrayTrace(two), "sliding-window", budget=2)
    assert out.mass_by_row.tolist() == [(1 + 1 + 0.875 + 0.4375) / 4, 1]
    assert out.recall_by_row.tolist() == [7 / 10, 7 / 10]  # zeros have heavy hitters too: the lowest positions
    assert out.retained_attention_mass == round6((1 + 1 + 0.875 + 0.4375 + 4) / 8)
    assert out.eviction_calls == 6


def test_half_of_the_last_digit_rounds_up() -> None:
    assert [round6(value) for value in (0.1234565, 0.00000049, 0.9999995)] == [0.123457, 0.0, 1.0]


def test_a_trace_without_steps_gives_zeros() -> None:
    made = [policy(name) for name in POLICIES]
    for out in replay_all(ArrayTrace(np.ones((1, 1))), made):
        assert (out.retained_attention_mass, out.heavy_hitter_recall, out.eviction_calls) == (0, 0, 0)
        assert (out.mass_by_row.tolist(), out.recall_by_row.tolist()) == ([0], [0])
        assert out.kept(0).tolist() == [0]


def test_results_come_in_the_order_asked() -> None:
    made = [policy(name, budget=3) for name in ("tova", "sliding-window", "random")] + [policy("full")]
    assert [out.policy for out in replay_all(hand_made(), made)] == made
    assert replay_all(hand_made(), []) == []


def test_the_public_names_take_a_name_or_a_policy() -> None:
    trace = hw.canonical_trace(tokens=100)
    named = hw.replay(trace, "h2o", budget=40)
    made = hw.replay(trace, hw.policy("h2o", budget=40))
    assert np.array_equal(named.left, made.left)
    assert (named.policy, named.trace, named.tokens) == (made.policy, "decode-100", 100)
    with pytest.raises(UnknownName, match="unknown policy 'h3o'"):
        hw.replay(trace, "h3o")
    with pytest.raises(UsageError, match="h2o has no parameter 'size'"):
        hw.replay(trace, "h2o", size=3)
    with pytest.raises(UsageError, match="chunk_bytes must be at least 1"):
        hw.replay(trace, "h2o", chunk_bytes=0)


@pytest.mark.parametrize("by_rule", [False, True])
def test_full_needs_room_for_the_whole_trace(by_rule: bool) -> None:
    refusal = r"full keeps every token, so its budget must be at least the 5 tokens of hand made, got 4"
    with pytest.raises(BudgetError, match=refusal):
        replay_all(hand_made(), [policy("full", budget=4)], by_rule=by_rule)
    assert replay_all(hand_made(), [policy("full", budget=5)], by_rule=by_rule)[0].retained_attention_mass == 1


@pytest.mark.parametrize("by_rule", [False, True])
@pytest.mark.parametrize("bad", [-0.5, np.nan, np.inf])
def test_what_is_no_weight_is_refused_with_its_place(bad: float, by_rule: bool) -> None:
    weights = np.full((4, 50, 50), 0.125, dtype=np.float32)
    weights[2, 40, 7] = bad
    weights[3, 30, 33] = bad  # above the diagonal: not read
    refusal = rf"mine: the weight of position 7 is {bad} at row 2, step 40; attention weights are finite"
    for chunk_bytes in (1, 1 << 20):
        with pytest.raises(InputFileError, match=refusal):
            replay_all(
                ArrayTrace(weights, name="mine"), [policy("tova", budget=8)], chunk_bytes=chunk_bytes, by_rule=by_rule
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Faulty(SlidingWindow):
    """A window whose victims are changed before they are handed over."""

    name: ClassVar[str] = "faulty"

    spoil: Callable[[NDArray[np.bool_]], Any]

    def victims(self, slots: Slots[None], budget: int) -> Any:
        return self.spoil(SlidingWindow.victims(self, slots, budget))

    def window(self, prefix_tokens: int = 0, block: int | None = None) -> Any:
        return Policy.window(self, prefix_tokens, block)


def uneven(victims: NDArray[np.bool_]) -> NDArray[np.bool_]:
    victims[1, -1] = True
    return victims


FAULTS = [
    # what becomes of the victims, and what is said of it
    (np.zeros_like, "faulty: 3 positions are held after the eviction of step 2, the budget is 2"),
    (uneven, "at step 2 row 0 loses 1 and row 1 loses 2, the first of them position 0"),
    (lambda mask: mask[:, 1:], r"a mask of the slots held, bool \[2, 3\], got bool \[2, 2\] at step 2"),
    (lambda mask: mask[:1], r"a mask of the slots held, bool \[2, 3\], got bool \[1, 3\] at step 2"),
    (lambda mask: mask.astype(float), r"a mask of the slots held, bool \[2, 3\], got float64 \[2, 3\] at step 2"),
    (lambda mask: [0], r"a mask of the slots held, bool \[2, 3\], got \[0\] at step 2"),
]


@pytest.mark.parametrize(("spoil", "said"), FAULTS, ids=[said[:40] for _, said in FAULTS])
def test_a_rule_that_breaks_the_contract_is_named(spoil: Callable[[Any], Any], said: str) -> None:
    trace = ArrayTrace(np.ones((2, 6, 6)))
    with pytest.raises(PolicyFault, match=said):
        replay(trace, Faulty(budget=2, spoil=spoil))
    assert replay(trace, Faulty(budget=2, spoil=lambda mask: mask)).way == "rule"


class Reused(Trace):
    """Many heads whose chunks are all the same array, as a reader that saves memory hands them out."""

    def __init__(self, rows: int, tokens: int) -> None:
        self.name, self.tokens = "reused", tokens
        self.heads = tuple(Head(layer=row // 8, head=row % 8) for row in range(rows))

    def chunks(self, chunk_bytes: int = 1 << 26) -> Iterator[Chunk]:
        count = steps_per_chunk(chunk_bytes, rows=self.rows, tokens=self.tokens)
        space = np.empty((self.rows, count, self.tokens), dtype=np.float32)
        random = np.random.default_rng(0)
        for first in range(1, self.tokens, count):
            stop = min(first + count, self.tokens)
            random.random(out=space, dtype=np.float32)
            yield Chunk(first=first, weights=space[:, : stop - first])


class Fresh(Reused):
    """The same heads, every chunk an array of its own; notes whether the one before was let go of by then."""

    def chunks(self, chunk_bytes: int = 1 << 26) -> Iterator[Chunk]:
        before: weakref.ref[np.ndarray] | None = None
        for chunk in super().chunks(chunk_bytes):
            assert before is None or before() is None, "two chunks are in memory at the same time"
            weights = chunk.weights.copy()
            before = weakref.ref(weights)
            yield Chunk(first=chunk.first, weights=weights)
            del chunk, weights


@pytest.mark.parametrize("by_rule", [False, True])
def test_a_chunk_is_let_go_of_before_the_next_is_read(by_rule: bool) -> None:
    trace = Fresh(9, 60)
    replay_all(
        trace,
        [policy("tova", budget=9), policy("streaming-llm", budget=9)],
        chunk_bytes=9 * 60 * 4 * 7,
        by_rule=by_rule,
    )


def test_memory_stays_within_twice_the_chunk() -> None:
    """The chunk is part of it; the results, which stay, are not. What is counted are the arrays: what a process holds
    tells little after other tests."""
    trace, size = Reused(64, 1200), 16 << 20
    replay(Reused(2, 40), "tova", budget=16)
    tracemalloc.start()
    try:
        out = replay(trace, "tova", budget=256, chunk_bytes=size)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    kept = sum(array.nbytes for array in (out.mass, out.hits, out.left))
    assert 0.9 * size < peak < 2 * size + kept
    assert out.way == "compiled"
