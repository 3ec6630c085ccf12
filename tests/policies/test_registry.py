"""Names, parameters, refusals and the table."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import pytest

from headwater.errors import BudgetError, UnknownName, UnsupportedCall, UsageError
from headwater.policies import POLICIES, SlidingWindow, StreamingLLM, Tova, policy, require, table


def test_names_are_the_policies_own() -> None:
    assert list(POLICIES) == [kind.name for kind in POLICIES.values()]


# The parameters of each policy and their defaults: those of the specification, and what is ours beside them.
DEFAULTS = {
    "full": {"budget": 512},
    "random": {"budget": 512, "sinks": 0, "seed": 0},
    "sliding-window": {"budget": 512},
    "streaming-llm": {"budget": 512, "sinks": 4},
    "h2o": {"budget": 512, "sinks": 0, "recent_window": 32},
    "scissorhands": {"budget": 512, "sinks": 0, "recent_window": 32},
    "tova": {"budget": 512, "sinks": 0},
    "snapkv": {"budget": 512, "sinks": 0, "recent_window": 32, "obs_window": 16, "pool_kernel": 7},
    "pyramidkv": {
        "budget": 512,
        "sinks": 0,
        "recent_window": 32,
        "obs_window": 16,
        "pool_kernel": 7,
        "layer": 0,
        "num_layers": 1,
        "pyramid_ratio": 4,
    },
}


def test_parameters_and_their_defaults() -> None:
    assert {name: asdict(policy(name)) for name in POLICIES} == DEFAULTS


def test_a_name_and_parameters_make_a_policy() -> None:
    assert policy("streaming-llm", budget=64, sinks=2) == StreamingLLM(budget=64, sinks=2)


def test_an_instance_is_accepted_wherever_a_name_is() -> None:
    own = Tova(budget=8)
    assert policy(own) is own


def test_an_instance_takes_no_parameters() -> None:
    with pytest.raises(UsageError, match="sliding-window is made already, so it takes no parameters; got budget"):
        policy(SlidingWindow(), budget=8)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UnknownName, match=r"'slidingwindow'; known: full, h2o, pyramidkv, random, .*, tova$"):
        policy("slidingwindow")


def test_an_unknown_parameter_lists_the_allowed_ones() -> None:
    with pytest.raises(UsageError, match="sliding-window has no parameter 'sinks'; allowed: budget"):
        policy("sliding-window", budget=8, sinks=4)


WITH_SINKS = [name for name in POLICIES if "sinks" in DEFAULTS[name]]
WITH_A_WINDOW = [name for name in POLICIES if "recent_window" in DEFAULTS[name]]
POOLED = ("snapkv", "pyramidkv")


# Every refusal is a ValueError that names the policy, the parameter and the value received.
@pytest.mark.parametrize(
    ("name", "parameters", "parameter", "value"),
    [
        *[(name, {"budget": 0}, "budget", "0") for name in POLICIES],
        *[(name, {"budget": -3}, "budget", "-3") for name in POLICIES],
        *[(name, {"budget": True}, "budget", "True") for name in POLICIES],
        *[(name, {"budget": 8.0}, "budget", r"8\.0") for name in POLICIES],
        *[(name, {"budget": "8"}, "budget", "'8'") for name in POLICIES],
        *[(name, {"sinks": -1}, "sinks", "-1") for name in WITH_SINKS],
        *[(name, {"budget": 8, "sinks": 8}, "sinks", "8") for name in WITH_SINKS],
        *[(name, {"budget": 8, "sinks": 9}, "sinks", "9") for name in WITH_SINKS],
        *[(name, {"sinks": False}, "sinks", "False") for name in WITH_SINKS],
        *[(name, {"sinks": 2.0}, "sinks", r"2\.0") for name in WITH_SINKS],
        ("streaming-llm", {"budget": 4}, "sinks", "4"),  # the default obeys the same rule
        ("random", {"seed": -1}, "seed", "-1"),
        ("random", {"seed": 0.5}, "seed", r"0\.5"),
        ("pyramidkv", {"num_layers": 0}, "num_layers", "0"),
        ("pyramidkv", {"num_layers": True}, "num_layers", "True"),
        ("pyramidkv", {"num_layers": 4.0}, "num_layers", r"4\.0"),
        ("pyramidkv", {"num_layers": 4, "layer": -1}, "layer", "-1"),
        ("pyramidkv", {"num_layers": 4, "layer": 4}, "layer", "4"),
        ("pyramidkv", {"layer": 1}, "layer", "1"),  # of the one layer there is by default
        ("pyramidkv", {"num_layers": 4, "layer": True}, "layer", "True"),
        ("pyramidkv", {"pyramid_ratio": 0}, "pyramid_ratio", "0"),
        ("pyramidkv", {"pyramid_ratio": 4.0}, "pyramid_ratio", r"4\.0"),
        *[(name, {"recent_window": -1}, "recent_window", "-1") for name in WITH_A_WINDOW],
        *[(name, {"budget": 8, "recent_window": 8}, "recent_window", "8") for name in WITH_A_WINDOW],
        *[(name, {"budget": 8, "recent_window": 9}, "recent_window", "9") for name in WITH_A_WINDOW],
        *[(name, {"recent_window": 2.0}, "recent_window", r"2\.0") for name in WITH_A_WINDOW],
        *[(name, {"recent_window": False}, "recent_window", "False") for name in WITH_A_WINDOW],
        *[(name, {"budget": 32}, "recent_window", "32") for name in WITH_A_WINDOW],  # the default again
        *[(name, {"budget": 36, "sinks": 4}, "recent_window", "32") for name in WITH_A_WINDOW],
        *[(name, {"obs_window": 0}, "obs_window", "0") for name in POOLED],
        *[(name, {"obs_window": True}, "obs_window", "True") for name in POOLED],
        *[(name, {"obs_window": 16.0}, "obs_window", r"16\.0") for name in POOLED],
        *[(name, {"pool_kernel": 0}, "pool_kernel", "0") for name in POOLED],
        *[(name, {"pool_kernel": -1}, "pool_kernel", "-1") for name in POOLED],
        *[(name, {"pool_kernel": 6}, "pool_kernel", "6") for name in POOLED],
        *[(name, {"pool_kernel": True}, "pool_kernel", "True") for name in POOLED],
        *[(name, {"pool_kernel": 7.0}, "pool_kernel", r"7\.0") for name in POOLED],
    ],
)
def test_refusals(name: str, parameters: dict[str, Any], parameter: str, value: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: {parameter} must .* got {parameter}={value}(;|$)") as refusal:
        policy(name, **parameters)
    assert isinstance(refusal.value, BudgetError)


# In the order in which they are looked at; each with a value that is refused for its size, and one for its kind.
REFUSED = {
    "budget": (0, 0.5),
    "sinks": (-1, 0.5),
    "num_layers": (0, 0.5),
    "layer": (-1, 0.5),
    "pyramid_ratio": (0, 0.5),
    "recent_window": (-1, 0.5),
    "obs_window": (0, 0.5),
    "pool_kernel": (2, 0.5),
    "seed": (-1, 0.5),
}


@pytest.mark.parametrize("kind", [0, 1], ids=["size", "kind"])
@pytest.mark.parametrize("name", POLICIES)
def test_of_several_refusals_the_first_one_is_said(name: str, kind: int) -> None:
    """All parameters are wrong; then the first of them is put right, and so on."""
    order = [parameter for parameter in REFUSED if parameter in DEFAULTS[name]]
    assert set(order) == set(DEFAULTS[name])
    for at, parameter in enumerate(order):
        wrong = {later: REFUSED[later][kind] for later in order[at:]}
        with pytest.raises(BudgetError, match=rf"^{name}: {parameter} must "):
            policy(name, **wrong)


# The smallest budget, and every parameter at the largest or smallest value that is taken.
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        *[(name, {"budget": 1}) for name in POLICIES if name not in (*WITH_A_WINDOW, "streaming-llm")],
        *[(name, {"budget": 1, "sinks": 0}) for name in WITH_SINKS if name not in WITH_A_WINDOW],
        *[(name, {"budget": 9, "sinks": 8}) for name in WITH_SINKS if name not in WITH_A_WINDOW],
        *[(name, {"budget": 1, "recent_window": 0}) for name in WITH_A_WINDOW],
        *[(name, {"budget": 33}) for name in WITH_A_WINDOW],
        *[(name, {"budget": 37, "sinks": 4}) for name in WITH_A_WINDOW],
        ("streaming-llm", {"budget": 5}),
        *[(name, {"obs_window": 1, "pool_kernel": 1}) for name in POOLED],
        ("pyramidkv", {"num_layers": 4, "layer": 3, "pyramid_ratio": 1}),
    ],
)
def test_the_outermost_values_that_fit(name: str, parameters: dict[str, int]) -> None:
    made = asdict(policy(name, **parameters))
    assert {parameter: made[parameter] for parameter in parameters} == parameters


def test_a_policy_is_immutable() -> None:
    with pytest.raises(AttributeError):
        StreamingLLM().budget = 8  # pyright: ignore[reportAttributeAccessIssue]


def test_an_engine_without_attention_is_refused_with_what_would_work() -> None:
    with pytest.raises(UnsupportedCall) as refusal:
        require(Tova(budget=8), frozenset())
    assert str(refusal.value) == (
        "tova needs attention, which this engine does not supply; these would work: full, sliding-window, streaming-llm"
    )


def test_what_would_work_depends_on_what_is_supplied() -> None:
    """Where attention is, every policy that needs no more."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Thirsty(Tova):
        name: ClassVar[str] = "thirsty"

        @property
        def needs(self) -> frozenset[str]:
            return frozenset({"attention", "water"})

    with pytest.raises(UnsupportedCall, match=rf"needs water,.* would work: {', '.join(sorted(POLICIES))}$"):
        require(Thirsty(), frozenset({"attention"}))


def test_an_engine_that_supplies_enough_is_accepted() -> None:
    require(Tova(budget=8), frozenset({"attention"}))
    require(StreamingLLM(), frozenset())


# Bytes per slot: position, signal, and scratch.
@pytest.mark.parametrize(
    ("name", "cost"),
    [
        ("full", 0),
        ("random", 4),
        ("sliding-window", 4),
        ("streaming-llm", 4),
        ("h2o", 4 + 8 + 1),
        ("scissorhands", 4 + 4 + 1),
        ("tova", 4 + 8 + 1),
        ("snapkv", 4 + 4 * 16 + 16 + 1),
        ("pyramidkv", 4 + 4 * 16 + 16 + 1),
    ],
)
def test_the_cost_of_a_slot(name: str, cost: int) -> None:
    assert policy(name).state_bytes_per_slot == cost


def test_a_longer_history_costs_more() -> None:
    assert policy("snapkv", obs_window=64).state_bytes_per_slot == 4 + 4 * 64 + 16 + 1


def test_capacity_is_one_more_than_the_budget() -> None:
    assert {name: policy(name, budget=64).capacity for name in POLICIES} == dict.fromkeys(POLICIES, 65) | {"full": 64}


def test_the_table_has_a_row_for_every_policy() -> None:
    head, rule, *rows = table().splitlines()
    assert [row.split("`")[1] for row in rows] == list(POLICIES)
    assert {line.count("|") for line in (head, rule, *rows)} == {6}
    for row, kind in zip(rows, POLICIES.values(), strict=True):
        needs = ", ".join(kind().needs) or "nothing"
        assert f"| {kind.summary} | {needs} | {kind().state_bytes_per_slot} | {kind.source} |" in row
