"""Sinks as an option of every policy that has a choice: off by default, and then the head of the stream stays."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from headwater.policies import H2O, POLICIES, Incremental, Policy, PyramidKV
from tests.policies.test_laws import kept

OPTIONAL = ("random", "h2o", "scissorhands", "tova", "snapkv", "pyramidkv")
WITH_A_WINDOW = ("h2o", "scissorhands", "snapkv", "pyramidkv")


def made(name: str, **parameters: int) -> Policy[Any]:
    """The policy with a recent window of 2 where it has one, unless the parameters say otherwise."""
    kind = POLICIES[name]
    window = {"recent_window": 2} if any(field.name == "recent_window" for field in fields(kind)) else {}
    return kind(**window | parameters)


def test_every_policy_with_sinks_is_among_those_tested() -> None:
    have = {name for name, kind in POLICIES.items() if any(field.name == "sinks" for field in fields(kind))}
    assert have == {*OPTIONAL, "streaming-llm"}


@pytest.mark.parametrize("name", OPTIONAL)
def test_there_are_none_unless_asked_for(name: str) -> None:
    assert made(name).sinks == 0  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("name", OPTIONAL)
@pytest.mark.parametrize("sinks", [1, 4])
@pytest.mark.parametrize("smaller", [8, 6, 0])
def test_the_head_of_the_stream_stays(name: str, sinks: int, smaller: int) -> None:
    """Also when every fifth eviction is to a smaller budget, or to none at all."""
    row, random = Incremental(made(name, budget=8, sinks=sinks)), np.random.default_rng(sinks)
    for position in range(1, 200):
        row.on_decode_step(position, random.random(row.kept_count()).tolist())
        row.evict(8 if position % 5 else smaller)
        assert kept(row)[:sinks] == list(range(min(sinks, position + 1)))


@pytest.mark.parametrize("name", OPTIONAL)
def test_without_them_the_head_goes_when_it_is_worth_least(name: str) -> None:
    row = Incremental(made(name, budget=8))
    for position in range(1, 40):
        # Position 0 gets nothing and every other the same, so its neighbours alone can save it, which pooling does.
        weights = np.full(row.kept_count(), 1.0)
        weights[: 4 if name in ("snapkv", "pyramidkv") else 1] = 0.0
        row.on_decode_step(position, weights.tolist())
        row.evict(8)
    assert 0 not in kept(row)


@pytest.mark.parametrize("name", WITH_A_WINDOW)
def test_sinks_and_window_must_leave_one_position_to_choose(name: str) -> None:
    assert made(name, budget=8, sinks=4, recent_window=3).budget == 8
    with pytest.raises(ValueError) as refusal:
        made(name, budget=8, sinks=4, recent_window=4)
    assert str(refusal.value) == (
        f"{name}: recent_window must be below the budget of 8 tokens less 4 sinks, got recent_window=4; "
        "raise the budget above 8 or take a smaller window"
    )


def test_sinks_are_held_inside_the_budget() -> None:
    row = Incremental(H2O(budget=4, sinks=2, recent_window=1))
    for position in range(1, 12):
        row.on_decode_step(position, [0.0] * row.kept_count())
        row.evict(4)
        assert row.kept_count() == min(position + 1, 4)
    assert kept(row) == [0, 1, 10, 11]


def test_a_share_of_pyramidkv_is_raised_to_hold_its_sinks_too() -> None:
    """Beside four sinks and a window of four, one position is left to choose: nine, where the share would be four."""
    deep = PyramidKV(budget=10, layer=3, num_layers=4, sinks=4, recent_window=4)
    assert deep.effective == 9
