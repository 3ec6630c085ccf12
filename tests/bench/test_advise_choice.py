"""What follows from the figures: the bend, the budgets, what fits a memory, and which row is advised."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.bench.advise_choice import LEAST_BEND, advise, bend, curve, decided, ranked
from headwater.bench.advise_plan import Costs, Maker, budgets, for_curve, for_memory, for_windows
from headwater.bench.advise_results import CURVE, FIT, WINDOW, Asked, Point
from headwater.errors import BudgetError, UsageError
from headwater.policies import H2O, POLICIES, PyramidKV, StreamingLLM
from headwater.traces import ArrayTrace, Head
from tests.bench.advice import made

# The bend


def points(*mass: float, first: int = 64) -> list[Point]:
    return [Point(budget=first << place, policy="tova", mass=value) for place, value in enumerate(mass)]


BENDS = [
    # masses at 64, 128, ...; the budget of the bend
    ((0.5, 0.9, 0.95, 1.0), 128),
    ((0.5, 0.7, 0.95, 1.0), 256),
    ((0.4, 0.6, 0.8, 1.0), None),  # every doubling buys the same
    ((0.4, 0.5, 0.7, 1.0), None),  # every doubling buys more
    ((0.4, 0.609, 0.8, 1.0), None),  # less than a hundredth above the chord
    ((0.4, 0.8, 0.8, 1.0), 128),
    ((0.1, 0.4, 0.7, 0.7, 0.7), 256),
    ((0.0, 0.5, 0.75, 0.75, 1.0), 128),  # 256 lies as far above; the smaller one counts
    ((0.5, 1.0), None),
    ((1.0,), None),
]


@pytest.mark.parametrize(("mass", "budget"), BENDS)
def test_the_curve_bends_where_it_lies_farthest_above_its_chord(mass: tuple[float, ...], budget: int | None) -> None:
    found = bend(points(*mass))
    assert (found and found.budget) == budget


def test_the_distance_is_measured_over_doublings_whatever_lies_between_the_budgets() -> None:
    """At 96 tokens, log2(96/64) = 0.585 of the way to 128; the whole conversation has no round number."""
    uneven = [Point(budget=budget, policy="", mass=mass) for budget, mass in ((64, 0.0), (96, 0.9), (128, 1.0))]
    found = bend(uneven)
    assert found is not None and found.budget == 96
    assert found.above == pytest.approx(0.9 - np.log2(1.5))


@given(st.lists(st.floats(0, 1), min_size=3, max_size=7), st.floats(0.05, 1))
def test_no_point_lies_farther_above_the_chord(mass: list[float], scale: float) -> None:
    found = bend(points(*mass))
    chord = np.linspace(mass[0], mass[-1], len(mass))
    above = [value - line for value, line in zip(mass, chord, strict=True)]
    if found is None:
        assert max(above) < LEAST_BEND
    else:
        assert found.above == pytest.approx(max(above)) and 64 < found.budget < 64 << (len(mass) - 1)


# Which row is advised

ROWS = [
    made("full", 1000, 1.0, live=False),
    *(made(name, 64, mass) for name, mass in (("tova", 0.5), ("streaming-llm", 0.45), ("random", 0.2))),
    *(made(name, 128, mass) for name, mass in (("tova", 0.8), ("h2o", 0.82), ("streaming-llm", 0.7), ("random", 0.4))),
    *(made(name, 256, mass) for name, mass in (("tova", 0.9), ("h2o", 0.85), ("sliding-window", 0.8), ("random", 0.6))),
    made("h2o", 256, 0.95, role=WINDOW, recent_window=8),
    made("tova", 140, 0.81, role=FIT),
    made("sliding-window", 150, 0.99, role=FIT),
    made("random", 150, 0.41, role=FIT),
    made("h2o", 130, 0.811, role=WINDOW),
]


def test_the_curve_is_the_best_policy_at_each_budget_and_then_everything() -> None:
    assert [(point.budget, point.policy, point.mass) for point in curve(ROWS)] == [
        (64, "tova", 0.5),
        (128, "h2o", 0.82),
        (256, "tova", 0.9),
        (1000, "full", 1.0),
    ]


DECIDED = [
    # what was asked for, what decides, the budget; best, live and random row by policy and budget
    (Asked(), "bend", 128, ("h2o", 128), ("streaming-llm", 128), ("random", 128)),
    (Asked(budget=256), "budget", 256, ("h2o", 256), ("sliding-window", 256), ("random", 256)),
    (Asked(memory_bytes=9), "memory", None, ("sliding-window", 150), ("sliding-window", 150), ("random", 150)),
]


@pytest.mark.parametrize(("asked", "by", "budget", "best", "live", "floor"), DECIDED, ids=lambda value: str(value)[:20])
def test_what_is_advised_is_the_best_where_the_budget_was_decided(
    asked: Asked, by: str, budget: int | None, best: object, live: object, floor: object
) -> None:
    found = advise(ROWS, asked, whole_fits=False)
    assert (found.by, found.budget) == decided(ROWS, asked, whole_fits=False) == (by, budget)
    chosen = [(row.policy, row.budget) for row in (found.best, found.live, found.floor)]
    assert chosen == [best, live, floor]
    assert found.bend is not None and found.bend.budget == 128


def test_another_recent_window_is_advised_where_it_keeps_more() -> None:
    assert advise(ROWS, Asked(budget=256), whole_fits=False).best.recent_window == 8


def test_of_policies_that_keep_as_good_as_the_same_the_cheapest_is_advised() -> None:
    base = [made("full", 1000, 1.0), made("random", 64, 0.2), made("streaming-llm", 64, 0.5)]
    dear, cheap = made("snapkv", 64, 0.9, state_bytes=90), made("tova", 64, 0.8991, state_bytes=20)
    found = advise([*base, dear, cheap], Asked(budget=64), whole_fits=False)
    assert (found.best, found.most) == (cheap, dear)
    worse = replace(cheap, retained_attention_mass=0.8989)
    assert advise([*base, dear, worse], Asked(budget=64), whole_fits=False).best == dear
    window = replace(dear, retained_attention_mass=0.9005, role=WINDOW)
    assert advise([*base, dear, window], Asked(budget=64), whole_fits=False).best == window
    live = [replace(base[2], state_bytes=99), made("sliding-window", 64, 0.4995)]
    assert advise([*base[:2], dear, *live], Asked(budget=64), whole_fits=False).live == live[1]


def test_in_a_memory_which_all_fill_what_keeps_most_is_advised() -> None:
    curve_rows = [row for row in ROWS if row.role == CURVE]
    fit = [
        made("snapkv", 60, 0.9, role=FIT, state_bytes=90),
        made("tova", 70, 0.8995, role=FIT),
        made("streaming-llm", 80, 0.5, role=FIT),
        made("random", 80, 0.2, role=FIT),
    ]
    found = advise([*curve_rows, *fit], Asked(memory_bytes=9), whole_fits=False)
    assert found.best == found.most == fit[0] and found.live == fit[2]


def test_a_memory_that_holds_everything_decides_nothing() -> None:
    assert advise(ROWS, Asked(memory_bytes=9), whole_fits=True).by == "bend"


def test_without_a_bend_the_largest_budget_is_taken() -> None:
    straight = [row if row.policy == "full" else replace(row, retained_attention_mass=0.1) for row in ROWS]
    found = advise(straight, Asked(), whole_fits=False)
    assert (found.by, found.budget, found.bend) == ("largest", 256, None)


def test_equals_are_told_apart_by_recall_and_then_by_bytes() -> None:
    rows = [
        made("a", 1, 0.5, state_bytes=9),
        made("b", 1, 0.5, state_bytes=5),
        made("c", 1, 0.5, heavy_hitter_recall=0.6, state_bytes=99),
        made("d", 1, 0.6, heavy_hitter_recall=0.1),
    ]
    assert [row.policy for row in ranked(rows)] == ["d", "c", "b", "a"]


# The budgets

MAKER = Maker(pins=4, sinks=None, seed=3)

BUDGETS = [
    # pins, tokens, budget asked for; budgets of the curve
    (4, 5081, None, (128, 256, 512, 1024, 2048)),
    (4, 410, None, (64, 128)),
    (4, 130, None, (64,)),
    (4, 65, None, (64,)),
    (4, 410, 100, (64, 100, 128)),
    (4, 410, 409, (64, 128, 409)),
    (4, 410, 128, (64, 128)),
    (40, 410, None, (128,)),  # a long system prompt: 40 pinned, a window of 32, and one to choose
    (140, 300, None, (173,)),
    (140, 300, 200, (173, 200)),
]


@pytest.mark.parametrize(("pins", "tokens", "asked", "expected"), BUDGETS)
def test_budgets_are_powers_of_two_up_to_half_of_the_conversation(
    pins: int, tokens: int, asked: int | None, expected: tuple[int, ...]
) -> None:
    assert budgets(replace(MAKER, pins=pins), tokens, asked) == expected


REFUSED = [
    (4, 64, None, UsageError, "the conversation has 64 tokens, and budgets are compared from 64 on"),
    (90, 123, None, UsageError, "take one of at least 124 tokens"),
    (4, 410, 63, BudgetError, "compared from 64 tokens on: 4 pinned, a recent window of 32.*got a budget of 63"),
    (4, 410, 410, BudgetError, "a budget of 410 holds the whole conversation of 410 tokens"),
]


@pytest.mark.parametrize(("pins", "tokens", "asked", "kind", "said"), REFUSED)
def test_budgets_that_say_nothing_are_refused(
    pins: int, tokens: int, asked: int | None, kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said):
        budgets(replace(MAKER, pins=pins), tokens, asked)


def test_every_policy_is_a_candidate_at_every_budget_and_everything_once() -> None:
    found = for_curve(MAKER, (64, 128), 500)
    asked = {(each.policy.name, each.policy.budget) for each in found}
    assert asked == {("full", 500)} | {(name, budget) for name in POLICIES if name != "full" for budget in (64, 128)}
    assert len(found) == len(asked) and {each.role for each in found} == {CURVE}
    assert {each.policy.name for each in found if each.live} == {"sliding-window", "streaming-llm"}


def test_streaming_llm_pins_what_chat_pins_and_the_others_take_the_sinks() -> None:
    maker = Maker(pins=21, sinks=2, seed=3)
    pinning = maker.candidate("streaming-llm", 64, CURVE)
    assert pinning.policy == StreamingLLM(budget=64, sinks=21)
    assert pinning.recent_window == 43
    assert maker.candidate("h2o", 64, CURVE).policy == H2O(budget=64, sinks=2)
    assert maker.candidate("random", 64, CURVE).policy == POLICIES["random"](budget=64, sinks=2, seed=3)  # pyright: ignore[reportCallIssue]
    assert maker.candidate("sliding-window", 64, CURVE).recent_window == 64
    assert maker.candidate("tova", 64, CURVE).recent_window is None


def test_other_recent_windows_are_tried_where_one_can_be_set_and_leaves_a_choice() -> None:
    maker = Maker(pins=4, sinks=2, seed=0)
    names = ("tova", "h2o", "streaming-llm", "pyramidkv")
    for budget, windows in ((130, (8,)), (131, (8, 128))):  # 32 is there already, 128 needs room beside two sinks
        found = for_windows(maker, [maker.candidate(name, budget, FIT) for name in names])
        assert [(each.policy.name, each.recent_window) for each in found] == [
            (name, window) for name in ("h2o", "pyramidkv") for window in windows
        ]
        assert {(each.policy.budget, each.role) for each in found} == {(budget, WINDOW)}


# Bytes

HEADS = tuple(Head(layer=layer, head=head) for layer in (2, 5, 7) for head in range(2))
TRACE = ArrayTrace(np.zeros((6, 900, 900), dtype=np.float32), heads=HEADS)
COSTS = Costs(kv_bytes_per_token=3000, trace=TRACE)


def test_the_cost_is_keys_and_values_of_one_token_more_and_a_state_for_every_head() -> None:
    assert COSTS.cache(H2O(budget=99)) == 100 * 3000
    assert COSTS.state(H2O(budget=99)) == 100 * 13 * 6
    assert COSTS.total(H2O(budget=99)) == 100 * 3000 + 100 * 13 * 6
    assert COSTS.cache(POLICIES["full"](budget=900)) == COSTS.total(POLICIES["full"](budget=900)) == 900 * 3000
    # pyramidkv's layers hold 161, 101 and 40 and each one more; K and V of a layer are a third of a token's
    assert COSTS.cache(PyramidKV(budget=101)) == (162 + 102 + 41) * 1000


@given(st.integers(300_000, 2_600_000), st.integers(0, 40))
@settings(max_examples=15)
def test_a_memory_is_filled_by_every_policy_and_by_none_overfilled(memory: int, sinks: int) -> None:
    maker = Maker(pins=max(4, sinks), sinks=sinks, seed=0)
    found, left_out = for_memory(maker, COSTS, memory)
    assert {each.policy.name for each in found} | set(left_out) == POLICIES.keys() - {"full"}
    for each in found:
        assert COSTS.total(each.policy) <= memory
        more = maker.candidate(each.policy.name, each.policy.budget + 1, FIT)
        assert COSTS.total(more.policy) > memory
    for name in left_out:
        assert COSTS.total(maker.candidate(name, maker.least, FIT).policy) > memory


@pytest.mark.parametrize("name", ["sliding-window", "tova", "pyramidkv"])
def test_a_budget_that_fills_the_memory_to_the_last_byte_fits(name: str) -> None:
    memory = COSTS.total(MAKER.candidate(name, 200, FIT).policy)
    for size, budget in ((memory, 200), (memory - 1, 199)):
        assert {each.policy.name: each.policy.budget for each in for_memory(MAKER, COSTS, size)[0]}[name] == budget


def test_what_remembers_more_gets_a_smaller_budget_or_none() -> None:
    budget = {each.policy.name: each.policy.budget for each in for_memory(MAKER, COSTS, 1_000_000)[0]}
    assert budget["sliding-window"] > budget["tova"] > budget["snapkv"]
    heavy = replace(COSTS, kv_bytes_per_token=30)
    found, left_out = for_memory(MAKER, heavy, 20_000)
    assert left_out == ["snapkv", "pyramidkv"] and len(found) == len(POLICIES) - 3


def test_a_memory_below_the_smallest_budget_is_refused_saying_how_much_it_takes() -> None:
    with pytest.raises(BudgetError, match=r"100\.0 KiB do not hold .* 64 tokens: at 3,000 bytes a token .* 192\.0 KiB"):
        for_memory(MAKER, COSTS, 100 << 10)
