"""Settings at which one policy is another: the reductions of the specification that hold whatever the attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.policies import H2O, POLICIES, Incremental, Policy, PyramidKV, SnapKV, Tova, policy
from tests.policies.test_laws import Attention, draw_budgets, kept

STEPS = 16


def same(
    data: st.DataObject,
    one: Policy[Any],
    other: Policy[Any],
    *,
    attention: Callable[[Attention, int], list[float] | None] = Attention.row_or_none,
) -> None:
    """Drive both with the same attention, evicting to the same budgets, theirs or smaller."""
    first, second, shown = Incremental(one), Incremental(other), Attention(data)
    for position, asked in enumerate(draw_budgets(data, STEPS), start=1):
        weights = attention(shown, first.kept_count())
        first.on_decode_step(position, weights)
        second.on_decode_step(position, weights)
        budget = one.budget if asked is None else min(asked, one.budget)
        assert first.evict(budget) == second.evict(budget)
        assert kept(first) == kept(second)


def draw_snapkv(data: st.DataObject) -> dict[str, int]:
    """Parameters of snapkv, which are parameters of pyramidkv too."""
    budget = data.draw(st.integers(1, 10), label="budget")
    sinks = data.draw(st.integers(0, budget - 1), label="sinks")
    return {
        "budget": budget,
        "sinks": sinks,
        "recent_window": data.draw(st.integers(0, budget - sinks - 1), label="recent window"),
        "obs_window": data.draw(st.integers(1, 5), label="observation window"),
        "pool_kernel": data.draw(st.sampled_from([1, 3, 5, 7, 99]), label="kernel"),
    }


@pytest.mark.parametrize(
    "layer",
    [
        {"num_layers": 1},
        {"num_layers": 1, "pyramid_ratio": 9},
        {"num_layers": 5, "layer": 4, "pyramid_ratio": 1},
        {"num_layers": 5, "layer": 2},  # the middle of an odd stack
        {"num_layers": 3, "layer": 1, "pyramid_ratio": 9},
    ],
    ids=str,
)
@given(data=st.data())
def test_pyramidkv_with_an_average_share_is_snapkv(data: st.DataObject, layer: dict[str, int]) -> None:
    parameters = draw_snapkv(data)
    pyramid = PyramidKV(**parameters, **layer)
    assert pyramid.effective == pyramid.budget
    same(data, SnapKV(**parameters), pyramid)


@given(data=st.data())
def test_a_shallow_layer_of_pyramidkv_at_the_average_budget_is_snapkv(data: st.DataObject) -> None:
    """Its share is above every budget it is asked to evict to."""
    parameters = draw_snapkv(data)
    same(data, SnapKV(**parameters), PyramidKV(**parameters, num_layers=4, layer=data.draw(st.integers(0, 1))))


@given(data=st.data())
def test_snapkv_that_forgets_nothing_and_does_not_pool_is_h2o(data: st.DataObject) -> None:
    parameters = draw_snapkv(data) | {"pool_kernel": 1, "obs_window": data.draw(st.integers(STEPS, 2 * STEPS))}
    shared = {name: parameters[name] for name in ("budget", "sinks", "recent_window")}
    same(data, H2O(**shared), SnapKV(**parameters))


@given(data=st.data())
def test_snapkv_that_remembers_one_step_is_tova(data: st.DataObject) -> None:
    """When every step carries attention: a step without makes tova protect more than the newest position."""
    budget = data.draw(st.integers(2, 10), label="budget")
    sinks = data.draw(st.integers(0, budget - 2), label="sinks")
    one_step = SnapKV(budget=budget, sinks=sinks, recent_window=1, obs_window=1, pool_kernel=1)
    same(data, Tova(budget=budget, sinks=sinks), one_step, attention=Attention.row)


@pytest.mark.parametrize("name", POLICIES)
def test_a_budget_of_the_whole_length_evicts_nothing(name: str) -> None:
    row, random = Incremental(policy(name, budget=64)), np.random.default_rng(0)
    for position in range(1, 64):
        row.on_decode_step(position, random.random(row.kept_count()).tolist())
        assert row.evict(64) == []
    assert row.kept_count() == 64
