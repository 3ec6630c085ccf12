"""Cases worked out by hand for mistakes that the published ones let pass; A to K are those of the specification."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from headwater.policies import H2O, Incremental, Policy, Scissorhands, SnapKV, StreamingLLM, Tova


def after(policy: Policy[Any], *steps: Sequence[float] | None) -> Incremental[Any]:
    """A row that took these steps, `None` being one without attention."""
    row = Incremental(policy)
    for position, weights in enumerate(steps, start=1):
        row.on_decode_step(position, weights)
    return row


def snapkv(budget: int, recent_window: int, obs_window: int, pool_kernel: int) -> SnapKV:
    return SnapKV(budget=budget, recent_window=recent_window, obs_window=obs_window, pool_kernel=pool_kernel)


def test_a_survivor_keeps_its_ring_and_a_new_position_starts_with_an_empty_one() -> None:
    """Case A: storage that is used again after several victims at once."""
    row = after(snapkv(4, 1, 8, 1), [1], [0.5, 0.5], [0.25, 0.25, 0.5], [0.125, 0.125, 0.25, 0.5])
    assert row.evict(2) == [1, 2, 3]
    row.on_decode_step(5, [0.5, 0.25])
    assert [row.report("window_score_of", position) for position in (0, 4, 5)] == [2.375, 0.25, 0]


def test_pooling_reads_protected_neighbours() -> None:
    """Case B: pooling over the candidates alone would give [2]."""
    row = after(snapkv(4, 2, 8, 3), None, [0.25, 0.125], [0.125, 0.0625, 0.125], [0.125, 0.0625, 0.125, 0.625])
    assert row.evict(4) == [0]


def test_neighbours_are_neighbours_in_the_kept_order() -> None:
    """Case C: neighbours by distance in the stream would give [5] the second time."""
    row = after(snapkv(6, 1, 8, 3), *[None] * 5, [0.25, 0.25, 0.0625, 0.0625, 0.125, 0.125])
    assert row.evict(5) == [3, 4]
    row.on_decode_step(7, [0, 0, 0.5, 0, 0.125])
    assert row.evict(5) == [6]


def test_h2o_adds_up_in_float64() -> None:
    """Case D: in float32 the sum would be 99.99905."""
    row = after(H2O(budget=4096, recent_window=32), *[[float(np.float32(0.1))]] * 1000)
    assert row.report("score_of", 0) == 100.00000149011612


def test_snapkv_adds_up_in_float64() -> None:
    """The same mistake as in case D: in float32 the small weight is lost beside the large one."""
    row = after(snapkv(4, 1, 8, 1), [2.0**24], [1.0], [1.0])
    assert row.report("window_score_of", 0) == 2**24 + 2


LARGE = 2.0**53  # adding 1 to it changes nothing in float64


# The ring adds up from its first entry on, whatever the order in time and however a library likes to add.
@pytest.mark.parametrize(
    ("weights", "total"),
    [
        ([LARGE, 0, 1, -LARGE, 0, 0, 0, 0], 0),  # in pairs it would be 1
        ([0, LARGE, -LARGE, 0, 0, 0, 0, 0, 1], 0),  # the ring is full, so the 1 is in front; in time it would be 1
    ],
)
def test_snapkv_adds_in_the_order_of_the_ring(weights: list[float], total: float) -> None:
    row = after(snapkv(16, 1, 8, 1), *[[weight] for weight in weights])
    assert row.report("window_score_of", 0) == total


def test_votes_are_counted_in_float64() -> None:
    """Case E: float32(1/3) is above 1/3, and equal to it in float32."""
    row = after(Scissorhands(budget=4, recent_window=1), None, None, [float(np.float32(1 / 3))] * 3)
    assert [row.report("votes_of", position) for position in (0, 1, 2)] == [1, 1, 1]


def test_the_share_is_not_scaled_by_the_mass_that_is_left() -> None:
    """Case F: half of the attention went to positions that are gone; the share is one half all the same."""
    row = after(Scissorhands(budget=4, recent_window=1), None, [0.375, 0.125])
    assert row.report("votes_of", 0) == 0


def test_the_share_counts_what_is_held_and_not_what_was_seen() -> None:
    """Three of four positions are held: 0.3 is above a quarter, and below a third."""
    row = after(Scissorhands(budget=3, recent_window=1), None, None, None)
    assert row.evict(3) == [0]
    row.on_decode_step(4, [0.3, 0.3, 0.4])
    assert [row.report("votes_of", position) for position in (1, 2, 3)] == [0, 0, 1]


@pytest.mark.parametrize(("weights", "votes"), [([0.5], [0, 0, 0]), ([0.3, 0.5, 0.2, 9.0], [0, 1, 0])])
def test_the_share_counts_the_weights_that_apply(weights: list[float], votes: list[int]) -> None:
    """Three positions are held. Of too many weights the rest is as if it were not there."""
    row = after(Scissorhands(budget=4, recent_window=1), None, None, weights)
    assert [row.report("votes_of", position) for position in (0, 1, 2)] == votes


def test_an_empty_step_votes_for_nothing() -> None:
    row = after(Scissorhands(budget=4, recent_window=1), [2.0], [])
    assert [row.report("votes_of", position) for position in (0, 1)] == [1, 0]


def test_pooled_scores_stand_for_the_whole_eviction() -> None:
    """Case G: pooling again after each victim would give [3, 5]."""
    row = after(snapkv(6, 1, 8, 5), *[None] * 5, [0.25, 0.0625, 0, 0.0625, 0, 0])
    assert row.evict(5) == [3, 4]


def test_the_recent_window_stays_above_the_budget() -> None:
    """Case H."""
    row = after(H2O(budget=8, recent_window=6), *[None] * 8)
    assert row.evict(2) == [0, 1, 2]
    assert row.kept_count() == 6


def test_the_sinks_stay_above_the_budget() -> None:
    """Case I."""
    row = after(StreamingLLM(budget=8, sinks=4), *[None] * 8)
    assert row.evict(2) == [4, 5, 6, 7, 8]
    assert row.kept_count() == 4


def test_what_was_never_observed_is_no_victim() -> None:
    """Case J: not the newest position alone."""
    row = after(Tova(budget=8), *[None] * 8)
    assert row.evict(8) == []
    assert row.kept_count() == 9


def test_records_outlive_a_step_without_attention() -> None:
    """The two positions that have a record are the candidates; the two that have none stay."""
    row = after(Tova(budget=3), None, [0.25, 0.5], None)
    assert row.evict(1) == [0, 1]


def test_an_empty_step_moves_the_ring_on() -> None:
    """Case K: a step with no weight at all is not a step without attention."""
    row = after(snapkv(4, 1, 2, 1), [0.5], [0.25, 0.75], [])
    assert [row.report("window_score_of", position) for position in (0, 1)] == [0.75, 0.75]
    row.on_decode_step(4, [0.125, 0.25, 0.125, 0.0625])
    assert [row.report("window_score_of", position) for position in (0, 1, 2)] == [0.625, 0.25, 0.125]


def test_the_window_includes_the_position_just_added() -> None:
    """Two are protected: 3, which was just added, and 2. One more or fewer would spare 1 or take 2."""
    row = after(H2O(budget=3, recent_window=2), None, None, [0.5, 0.25, 0.125])
    assert row.evict(1) == [0, 1]


def test_h2o_without_a_window_freezes() -> None:
    """The newest position has no score and goes at once; the setting is accepted."""
    row = after(H2O(budget=2, recent_window=0), [1.0])
    for position in (2, 3, 4):
        row.on_decode_step(position, [0.5, 0.5])
        assert row.evict(2) == [position]


def test_equal_scores_lose_the_lowest_positions_even_among_many() -> None:
    """A sort that is not stable gets short arrays right all the same, so this one is long."""
    row = after(H2O(budget=600, recent_window=1), *[None] * 399, [0.5, 0.25] * 200)
    assert row.evict(351) == list(range(1, 101, 2))
    assert row.evict(350) == [101]


@pytest.mark.parametrize("kind", [H2O, Scissorhands, Tova, SnapKV], ids=lambda kind: kind.name)
def test_victims_come_ascending_whatever_the_order_of_choice(kind: type[Policy[Any]]) -> None:
    """Position 2 is the first choice of all four, and position 0 the second."""
    parameters = {"recent_window": 1, "pool_kernel": 1}
    taken = {field.name: parameters[field.name] for field in fields(kind) if field.name in parameters}
    row = after(kind(budget=4, **taken), None, None, [0.25, 0.5, 0.125], [0.375, 1.0, 0.125, 0.75])
    assert row.evict(3) == [0, 2]


def test_an_infrequent_eviction_goes_down_in_one_call() -> None:
    """Protection and capacity stay as constructed; the cache may fill up again."""
    row = after(Tova(budget=6), None, None, None, None, [0.5, 0.1, 0.4, 0.2, 0.3])
    assert row.evict(3) == [1, 3, 4]
    for position in (6, 7, 8, 9):
        row.on_decode_step(position, None)
    with pytest.raises(RuntimeError, match="tova was built for a budget of 6 tokens and holds 7"):
        row.on_decode_step(10, None)
