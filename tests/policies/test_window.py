"""The arithmetic of pins, window and block, at its boundaries."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import BudgetError
from headwater.policies import Window


@pytest.mark.parametrize(
    ("budget", "pins", "block"),
    [
        (1, 0, 1),  # the smallest budget
        (2, 0, 2),  # a block as large as the window
        (2, 1, 1),  # one token of window beside the pins
        (5, 4, 1),
        (64, 4, 60),
    ],
)
def test_what_fits(budget: int, pins: int, block: int) -> None:
    window = Window(budget=budget, pins=pins, block=block)
    assert window.recent == budget - pins


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"budget": 0}, "budget must be at least 1 token, got 0"),
        ({"budget": -1}, "budget must be at least 1 token, got -1"),
        ({"budget": 4, "pins": -1}, "pins must be at least 0, got -1"),
        ({"budget": 4, "pins": 4}, r"at least pins \+ 1 = 5 tokens .* got 4; raise the budget or pin less"),
        ({"budget": 4, "pins": 5}, r"at least pins \+ 1 = 6 tokens .* got 4"),
        ({"budget": 4, "pins": 1, "block": 4}, "block must be between 1 and the window of 3 tokens, got 4"),
        ({"budget": 4, "block": 0}, "block must be between 1 and the window of 4 tokens, got 0"),
        ({"budget": 4.0}, r"budget must be an integer, got 4\.0"),
        ({"budget": 4, "pins": True}, "pins must be an integer, got True"),
        ({"budget": 4, "block": "1"}, "block must be an integer, got '1'"),
    ],
)
def test_what_does_not_fit(given: dict[str, Any], message: str) -> None:
    with pytest.raises(BudgetError, match=message):
        Window(**given)


@pytest.mark.parametrize(
    ("held", "gone"), [(0, 0), (9, 0), (10, 0), (11, 3), (12, 3), (13, 3), (14, 6), (16, 6), (17, 9)]
)
def test_a_block_leaves_as_soon_as_one_token_is_too_many(held: int, gone: int) -> None:
    assert Window(budget=10, pins=2, block=3).excess(held) == gone


@pytest.mark.parametrize(("budget", "pins", "block"), [(1, 0, 1), (16, 0, 1), (31, 0, 1), (32, 0, 2), (36, 4, 2)])
def test_the_default_block_is_a_sixteenth_of_the_window(budget: int, pins: int, block: int) -> None:
    assert Window.of(budget, pins).block == block


def test_a_block_given_is_taken() -> None:
    assert Window.of(64, 4, 5).block == 5


@given(st.data())
def test_one_token_at_a_time_the_budget_holds_and_evictions_come_at_fixed_places(data: st.DataObject) -> None:
    budget = data.draw(st.integers(1, 40))
    pins = data.draw(st.integers(0, budget - 1))
    window = Window(budget=budget, pins=pins, block=data.draw(st.integers(1, budget - pins)))
    held = 0
    for fed in range(1, 120):
        gone = window.excess(held + 1)
        held += 1 - gone
        assert min(fed, pins) <= held <= budget
        assert (gone > 0) == (fed > budget and (fed - budget - 1) % window.block == 0)
        assert gone in (0, window.block)
