"""How pyramidkv shares out the budget, and the one way in which its evictions differ from all others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.policies import POLICIES, Incremental, PyramidKV, SnapKV, policy


def shares(budget: int, layers: int, ratio: int = 4, recent_window: int = 0) -> list[int]:
    return [
        PyramidKV(
            budget=budget, layer=layer, num_layers=layers, pyramid_ratio=ratio, recent_window=recent_window
        ).effective
        for layer in range(layers)
    ]


# The table of the specification: budget, layers -> the share of every layer.
@pytest.mark.parametrize(
    ("budget", "layers", "expected"),
    [
        (512, 4, [819, 614, 409, 204]),
        (256, 4, [409, 307, 204, 102]),
        (1024, 8, [1638, 1462, 1287, 1111, 936, 760, 585, 409]),
    ],
)
def test_published_shares(budget: int, layers: int, expected: list[int]) -> None:
    assert shares(budget, layers) == expected


def test_published_shares_of_a_deep_model() -> None:
    deep = shares(512, 32)
    assert (deep[:3], deep[-2:], sum(deep)) == ([819, 799, 779], [224, 204], 16_368)


def test_a_share_is_raised_to_leave_one_position_to_choose() -> None:
    assert shares(10, 4)[3] == 4
    assert shares(10, 4, recent_window=4)[3] == 5


@given(budget=st.integers(1, 2000), layers=st.integers(2, 64), ratio=st.integers(1, 9))
def test_shares_fall_with_depth_and_spend_the_budget_but_for_the_rounding(budget: int, layers: int, ratio: int) -> None:
    given = [
        2 * budget * (ratio * (layers - 1) - layer * (ratio - 1)) // ((ratio + 1) * (layers - 1))
        for layer in range(layers)
    ]
    made = shares(budget, layers, ratio)
    assert made == [max(share, 1) for share in given]
    assert made == sorted(made, reverse=True)
    assert layers * budget - layers < sum(given) <= layers * budget


def test_the_capacity_is_that_of_the_larger_of_budget_and_share() -> None:
    assert PyramidKV(budget=512, layer=0, num_layers=4).capacity == 820
    assert PyramidKV(budget=512, layer=3, num_layers=4).capacity == 513


def test_a_deep_layer_evicts_although_all_fits() -> None:
    """Down to its share, in one call; then it fills up again."""
    row = Incremental(PyramidKV(budget=10, layer=3, num_layers=4, recent_window=2))
    for position in range(1, 8):
        row.on_decode_step(position, None)
    assert row.evict(10) == [0, 1, 2, 3]
    assert row.report("effective_budget") == row.kept_count() == 4
    assert row.evict(10) == []


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "pyramidkv"])
@pytest.mark.parametrize("layers", [1, 30])
def test_other_policies_are_the_same_at_every_layer(name: str, layers: int) -> None:
    made = policy(name)
    assert made.at_layer(layers - 1, layers) is made


@pytest.mark.parametrize(("budget", "layers"), [(512, 4), (256, 4), (1024, 8), (512, 32)])
def test_over_a_model_each_layer_is_snapkv_with_its_share(budget: int, layers: int) -> None:
    whole = PyramidKV(budget=budget, sinks=4, recent_window=16, obs_window=8, pool_kernel=5)
    for depth, share in enumerate(shares(budget, layers)):
        assert whole.at_layer(depth, layers) == SnapKV(
            budget=share, sinks=4, recent_window=16, obs_window=8, pool_kernel=5
        )


def test_a_share_of_a_model_is_raised_too() -> None:
    """As snapkv it could not be built with less."""
    deepest = PyramidKV(budget=40, sinks=4, recent_window=32).at_layer(7, 8)
    assert deepest == SnapKV(budget=37, sinks=4, recent_window=32)


def test_over_one_layer_it_is_itself() -> None:
    whole = PyramidKV(budget=64)
    assert whole.at_layer(0, 1) is whole


def test_a_policy_made_for_one_layer_stays_as_it_is() -> None:
    third = PyramidKV(budget=512, layer=2, num_layers=4)
    assert third.at_layer(0, 30) is third
