"""Several rows at once, and a signal that differs between them: hand-made cases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
from jaxtyping import Bool, Float32, Int64

from headwater.errors import UnknownName, UsageError
from headwater.policies import Incremental, SlidingWindow, Slots, StreamingLLM
from headwater.policies.incremental import drop, start, step
from headwater.policies.signals import Signal, compact
from tests.policies.latest import Latest, LatestWeight


def weights(*rows: list[float]) -> Float32[np.ndarray, "rows weights"]:
    return np.asarray(rows, dtype=np.float32)


def test_each_row_drops_its_own_lowest_weight() -> None:
    policy = LatestWeight(budget=3)
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


def test_equal_weights_lose_the_lowest_position() -> None:
    row = Incremental(LatestWeight(budget=3))
    row.on_decode_step(1, [1.0])
    row.on_decode_step(2, [0.5, 0.5])
    row.on_decode_step(3, [0.5, 0.25, 0.25])
    assert row.evict(3) == [1]


def test_equal_weights_lose_the_lowest_positions_among_many() -> None:
    """A sort that is not stable gets short arrays right all the same, so this one is long."""
    policy = LatestWeight(budget=1)
    held = 400
    slots = Slots(positions=np.arange(held)[None, :], state=np.asarray([[0.5, 0.25] * (held // 2)]))
    gone = np.flatnonzero(policy.victims(slots, held - 50)[0])
    assert gone.tolist() == list(range(1, 100, 2))


def test_victims_come_ascending_whatever_the_order_of_choice() -> None:
    row = Incremental(LatestWeight(budget=3))
    row.on_decode_step(1, None)
    row.on_decode_step(2, None)
    row.on_decode_step(3, [0.25, 0.5, 0.125])
    assert row.evict(2) == [0, 2]  # position 2 has the lower weight and is chosen first


def test_a_step_without_attention_leaves_the_signal_alone() -> None:
    row = Incremental(LatestWeight(budget=3))
    row.on_decode_step(1, [0.5])
    row.on_decode_step(2, None)
    assert row.report("last_weight_of", 0) == 0.5
    assert row.report("last_weight_of", 2) == -1.0


def test_without_a_weight_ever_nothing_can_go() -> None:
    row = Incremental(LatestWeight(budget=2))
    row.on_decode_step(1, None)
    row.on_decode_step(2, None)
    assert row.evict(2) == []
    assert row.kept_count() == 3


@pytest.mark.parametrize("given", [[0.5, 0.25], [0.5, 0.25, 0.125, 9.0]], ids=["too few", "too many"])
def test_the_first_weights_count(given: list[float]) -> None:
    signal = Latest()
    state = signal.observe(np.asarray([[-1.0, -1.0, 1.0]]), weights(given))
    assert state.tolist() == [[0.5, 0.25, 0.125 if len(given) > 2 else 1.0]]


def test_rows_that_lose_different_numbers_of_slots_are_refused() -> None:
    policy = LatestWeight(budget=3)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class History(Signal[tuple[Float32[np.ndarray, "rows slots length"], int]]):
    """A ring of the last weights, with one index for all slots: state that is more than one array."""

    needs: ClassVar[frozenset[str]] = frozenset({"attention"})
    length: int

    @property
    def bytes_per_slot(self) -> int:
        return 4 * self.length

    def fresh(self, positions: Int64[np.ndarray, "rows slots"]) -> tuple[Float32[np.ndarray, "rows slots length"], int]:
        return np.zeros((*positions.shape, self.length), dtype=np.float32), 0

    def observe(
        self, state: tuple[np.ndarray, int], weights: Float32[np.ndarray, "rows weights"]
    ) -> tuple[np.ndarray, int]:
        ring, index = state[0].copy(), state[1]
        ring[:, : weights.shape[1], index] = weights
        return ring, (index + 1) % self.length

    def append(self, state: tuple[np.ndarray, int]) -> tuple[np.ndarray, int]:
        ring, index = state
        new = np.zeros((ring.shape[0], 1, self.length), dtype=np.float32)
        return np.concatenate([ring, new], axis=1), index

    def keep(self, state: tuple[np.ndarray, int], kept: Bool[np.ndarray, "rows slots"]) -> tuple[np.ndarray, int]:
        return compact(state[0], kept), state[1]


def test_a_state_of_rings_follows_its_slots() -> None:
    signal = History(length=2)
    slots = step(signal, start(signal, 2), 1, weights([1.0], [0.5]))
    slots = step(signal, slots, 2, weights([0.25, 0.75], [0.125, 0.0625]))
    slots = drop(signal, slots, np.asarray([[True, False, False], [False, True, False]]))
    ring, index = slots.state
    assert slots.positions.tolist() == [[1, 2], [0, 2]]
    assert ring.tolist() == [[[0.0, 0.75], [0.0, 0.0]], [[0.5, 0.125], [0.0, 0.0]]]
    assert index == 0


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
