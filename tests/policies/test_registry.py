"""Names, parameters, refusals and the table."""

from __future__ import annotations

from typing import Any

import pytest

from headwater.errors import BudgetError, UnknownName, UnsupportedCall, UsageError
from headwater.policies import POLICIES, SlidingWindow, StreamingLLM, policy, require, table
from tests.policies.latest import LatestWeight


def test_names_are_the_policies_own() -> None:
    assert list(POLICIES) == [kind.name for kind in POLICIES.values()]
    assert {"full", "sliding-window", "streaming-llm"} <= set(POLICIES)


def test_a_name_and_parameters_make_a_policy() -> None:
    assert policy("streaming-llm", budget=64, sinks=2) == StreamingLLM(budget=64, sinks=2)


@pytest.mark.parametrize("name", POLICIES)
def test_the_default_budget_is_that_of_the_specification(name: str) -> None:
    assert policy(name).budget == 512


def test_four_sinks_by_default() -> None:
    assert StreamingLLM().sinks == 4


def test_an_instance_is_accepted_wherever_a_name_is() -> None:
    own = LatestWeight(budget=8)
    assert policy(own) is own


def test_an_instance_takes_no_parameters() -> None:
    with pytest.raises(UsageError, match="sliding-window is made already, so it takes no parameters; got budget"):
        policy(SlidingWindow(), budget=8)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UnknownName, match=r"'slidingwindow'; known: full, sliding-window, streaming-llm"):
        policy("slidingwindow")


def test_an_unknown_parameter_lists_the_allowed_ones() -> None:
    with pytest.raises(UsageError, match="sliding-window has no parameter 'sinks'; allowed: budget"):
        policy("sliding-window", budget=8, sinks=4)


# Every refusal is a ValueError that names the policy, the parameter and the value received.
@pytest.mark.parametrize(
    ("name", "parameters", "parameter", "value"),
    [
        *[(name, {"budget": 0}, "budget", "0") for name in POLICIES],
        *[(name, {"budget": -3}, "budget", "-3") for name in POLICIES],
        *[(name, {"budget": True}, "budget", "True") for name in POLICIES],
        *[(name, {"budget": 8.0}, "budget", r"8\.0") for name in POLICIES],
        *[(name, {"budget": "8"}, "budget", "'8'") for name in POLICIES],
        ("streaming-llm", {"budget": 8, "sinks": -1}, "sinks", "-1"),
        ("streaming-llm", {"budget": 8, "sinks": 8}, "sinks", "8"),
        ("streaming-llm", {"budget": 8, "sinks": 9}, "sinks", "9"),
        ("streaming-llm", {"budget": 8, "sinks": False}, "sinks", "False"),
        ("streaming-llm", {"budget": 8, "sinks": 2.0}, "sinks", r"2\.0"),
        ("streaming-llm", {"budget": 4}, "sinks", "4"),  # the default obeys the same rule
        ("streaming-llm", {"budget": 0, "sinks": -1}, "budget", "0"),  # the budget is looked at first
    ],
)
def test_refusals(name: str, parameters: dict[str, Any], parameter: str, value: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: {parameter} must .* got {parameter}={value}(;|$)") as refusal:
        policy(name, **parameters)
    assert isinstance(refusal.value, BudgetError)


@pytest.mark.parametrize("accepted", [{"budget": 1, "sinks": 0}, {"budget": 9, "sinks": 8}, {"budget": 5}])
def test_the_smallest_values_that_fit(accepted: dict[str, int]) -> None:
    made = StreamingLLM(**accepted)
    assert made.budget - made.sinks >= 1


def test_a_policy_is_immutable() -> None:
    with pytest.raises(AttributeError):
        StreamingLLM().budget = 8  # pyright: ignore[reportAttributeAccessIssue]


def test_an_engine_without_attention_is_refused_with_what_would_work() -> None:
    with pytest.raises(UnsupportedCall) as refusal:
        require(LatestWeight(budget=8), frozenset())
    assert str(refusal.value) == (
        "latest-weight needs attention, which this engine does not supply; "
        "these would work: full, sliding-window, streaming-llm"
    )


def test_an_engine_that_supplies_enough_is_accepted() -> None:
    require(LatestWeight(budget=8), frozenset({"attention"}))
    require(StreamingLLM(), frozenset())


def test_the_cost_of_a_slot() -> None:
    assert policy("sliding-window").state_bytes_per_slot == 4
    assert policy("streaming-llm").state_bytes_per_slot == 4
    assert policy("full").state_bytes_per_slot == 0
    assert LatestWeight().state_bytes_per_slot == 13


def test_the_table_has_a_row_for_every_policy() -> None:
    head, rule, *rows = table().splitlines()
    assert [row.split("`")[1] for row in rows] == list(POLICIES)
    assert {line.count("|") for line in (head, rule, *rows)} == {6}
    for row, kind in zip(rows, POLICIES.values(), strict=True):
        assert f"| {kind.summary} | nothing | {kind().state_bytes_per_slot} | {kind.source} |" in row
