"""Several rows at once, and signals that differ between them: hand-made cases."""

from __future__ import annotations

import copy
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from jaxtyping import Float32

from headwater.errors import UnknownName, UsageError
from headwater.policies import Incremental, SlidingWindow, Slots, StreamingLLM, Tova
from headwater.policies.incremental import drop, start, step
from headwater.policies.signals import Cumulative, History, Latest, Signal, Votes


def weights(*rows: list[float]) -> Float32[np.ndarray, "rows weights"]:
    return np.asarray(rows, dtype=np.float32)


def test_each_row_drops_its_own_lowest_weight() -> None:
    policy = Tova(budget=3)
    slots = start(policy.signal, 2)
    slots = step(policy.signal, slots, 1, weights([1.0], [1.0]))
    slots = step(policy.signal, slots, 2, weights([0.25, 0.75], [0.75, 0.25]))
    slots = step(policy.signal, slots, 3, weights([0.5, 0.125, 0.375], [0.125, 0.5, 0.375]))
    victims = policy.victims(slots, 3)
    # Row 0 loses position 1, row 1 loses position 0; position 3 was never observed and stays in both.
    assert victims.tolist() == [[False, True, False, False], [True, False, False, False]]
    slots = drop(policy.signal, slots, victims)
    assert slots.positions.tolist() == [[0, 2, 3], [1, 2, 3]]
    assert slots.state.tolist() == [[0.5, 0.375, -1.0], [0.5, 0.375, -1.0]]
    # The next weights line up with what each row holds: row 0 now loses position 2, row 1 position 3.
    slots = step(policy.signal, slots, 4, weights([0.5, 0.125, 0.25], [0.5, 0.25, 0.125]))
    slots = drop(policy.signal, slots, policy.victims(slots, 3))
    assert slots.positions.tolist() == [[0, 3, 4], [1, 2, 4]]


# What each signal remembers of three slots after one step: of too few weights the first slots get one, of too many the
# rest is ignored. The share that votes are measured by is one over the weights that apply.
@pytest.mark.parametrize(
    ("signal", "given", "state"),
    [
        (Cumulative(), [0.5, 0.25], [0.5, 0.25, 0.0]),
        (Cumulative(), [0.5, 0.25, 0.125, 9.0], [0.5, 0.25, 0.125]),
        (Votes(), [0.75, 0.5], [1, 0, 0]),
        (Votes(), [0.75, 0.5, 0.25, 9.0], [1, 1, 0]),
        (Latest(), [0.5, 0.25], [0.5, 0.25, -1.0]),
        (Latest(), [0.5, 0.25, 0.125, 9.0], [0.5, 0.25, 0.125]),
        (History(obs_window=1), [0.5, 0.25], [[0.5], [0.25], [0.0]]),
        (History(obs_window=1), [0.5, 0.25, 0.125, 9.0], [[0.5], [0.25], [0.125]]),
    ],
    ids=repr,
)
def test_the_first_weights_count(signal: Signal[Any], given: list[float], state: list[Any]) -> None:
    seen = signal.observe(signal.fresh(np.asarray([[0, 1, 2]])), weights(given))
    array = seen.weights if isinstance(signal, History) else seen
    assert array.tolist() == [state]


def test_rows_that_lose_different_numbers_of_slots_are_refused() -> None:
    policy = Tova(budget=3)
    slots = step(policy.signal, start(policy.signal, 2), 1, None)
    with pytest.raises(UsageError, match=r"same number of slots, got \[1, 2\]"):
        drop(policy.signal, slots, np.asarray([[True, False], [False, False]]))


def test_rows_in_different_places_of_the_stream() -> None:
    """Sinks are counted per row: one row may have lost some of the positions that another still holds."""
    slots = Slots(positions=np.asarray([[0, 1, 5, 6], [3, 4, 5, 6]]), state=None)
    policy = StreamingLLM(budget=3, sinks=2)
    assert policy.victims(slots, 3).tolist() == [[False, False, True, False], [True, False, False, False]]
    assert policy.sink_count(slots).tolist() == [2, 0]
    assert SlidingWindow(budget=3).victims(slots, 2).tolist() == [[True, True, False, False]] * 2


def test_a_state_of_rings_follows_its_slots() -> None:
    signal = History(obs_window=2)
    slots = step(signal, start(signal, 2), 1, weights([1.0], [0.5]))
    slots = step(signal, slots, 2, weights([0.25, 0.75], [0.125, 0.0625]))
    slots = drop(signal, slots, np.asarray([[True, False, False], [False, True, False]]))
    assert slots.positions.tolist() == [[1, 2], [0, 2]]
    assert slots.state.weights.tolist() == [[[0.0, 0.75], [0.0, 0.0]], [[0.5, 0.125], [0.0, 0.0]]]
    assert slots.state.index == 0


@pytest.mark.parametrize("signal", [Cumulative(), Votes(), Latest(), History(obs_window=2)], ids=repr)
def test_a_state_is_a_value_that_no_later_step_changes(signal: Signal[Any]) -> None:
    """So that a run can be saved in the middle and replayed from there."""
    slots = step(signal, start(signal, 1), 1, weights([2.0]))
    before = copy.deepcopy(slots)
    step(signal, slots, 2, weights([4.0, 8.0]))
    drop(signal, slots, np.asarray([[True, False]]))
    np.testing.assert_equal(asdict(slots), asdict(before))


def test_an_unknown_report_lists_the_known_ones() -> None:
    row = Incremental(StreamingLLM(budget=6))
    with pytest.raises(UnknownName, match=r"report of streaming-llm 'votes_of'; known: sink_count"):
        row.report("votes_of", 0)


@pytest.mark.parametrize("position", [0, 2])
def test_decode_steps_count_up_by_one(position: int) -> None:
    with pytest.raises(UsageError, match=f"expected position 1, got {position}"):
        Incremental(SlidingWindow(budget=4)).on_decode_step(position, None)


@pytest.mark.parametrize("budget", [-1, True])
def test_a_budget_to_evict_to_is_a_number_of_tokens(budget: int) -> None:
    with pytest.raises(UsageError, match=rf"at least 0 tokens, got {budget}"):
        Incremental(SlidingWindow(budget=4)).evict(budget)
