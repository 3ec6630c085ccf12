"""The three policies that go by position: by hand, against each other, and on the way to the live cache."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import BudgetError, UsageError
from headwater.policies import Full, Incremental, SlidingWindow, StreamingLLM, Window


@given(budget=st.integers(1, 12), evictions=st.lists(st.none() | st.integers(0, 12), max_size=40))
def test_streaming_llm_without_sinks_is_a_sliding_window(budget: int, evictions: list[int | None]) -> None:
    plain, sinkless = Incremental(SlidingWindow(budget=budget)), Incremental(StreamingLLM(budget=budget, sinks=0))
    for position, asked in enumerate(evictions, start=1):
        plain.on_decode_step(position, None)
        sinkless.on_decode_step(position, None)
        to = budget if asked is None else min(asked, budget)
        assert plain.evict(to) == sinkless.evict(to)


def test_streaming_llm_keeps_its_sinks_above_the_budget() -> None:
    row = Incremental(StreamingLLM(budget=8, sinks=4))
    for position in range(1, 9):
        row.on_decode_step(position, None)
    assert row.evict(2) == [4, 5, 6, 7, 8]
    assert row.kept_count() == 4


def test_sinks_are_counted_from_the_construction_on() -> None:
    assert Incremental(StreamingLLM(budget=4, sinks=2)).report("sink_count") == 1
    assert Incremental(StreamingLLM(budget=4, sinks=0)).report("sink_count") == 0


def test_a_sliding_window_can_be_emptied() -> None:
    row = Incremental(SlidingWindow(budget=3))
    row.on_decode_step(1, None)
    assert row.evict(0) == [0, 1]
    assert row.kept_count() == 0
    row.on_decode_step(2, [])
    assert row.evict(3) == []


@pytest.mark.parametrize("policy", [SlidingWindow(budget=5), StreamingLLM(budget=5, sinks=4)])
def test_one_more_than_the_budget_is_held_before_an_eviction_and_not_two(policy: SlidingWindow | StreamingLLM) -> None:
    row = Incremental(policy)
    for position in range(1, 6):
        row.on_decode_step(position, None)
    assert row.kept_count() == 6
    with pytest.raises(RuntimeError, match=f"{policy.name} was built for a budget of 5 tokens and holds 6"):
        row.on_decode_step(6, None)


def test_full_ends_at_its_budget() -> None:
    row = Incremental(Full(budget=3))
    row.on_decode_step(1, None)
    row.on_decode_step(2, None)
    assert row.evict(1) == []
    with pytest.raises(RuntimeError, match="full was built for a budget of 3 tokens and holds 3"):
        row.on_decode_step(3, None)


# What each policy asks of the live cache: budget, sinks, prefix -> pins.
@pytest.mark.parametrize(
    ("budget", "sinks", "prefix", "pins"),
    [
        (64, 4, 0, 4),  # no prompt: the sinks
        (64, 4, 3, 4),  # a prompt inside the sinks
        (64, 4, 4, 4),
        (64, 4, 5, 5),  # a prompt longer than the sinks contains them
        (64, 0, 0, 0),
        (64, 4, 63, 63),  # one token of window is enough
    ],
)
def test_streaming_llm_pins_the_longer_of_sinks_and_prefix(budget: int, sinks: int, prefix: int, pins: int) -> None:
    window = StreamingLLM(budget=budget, sinks=sinks).window(prefix)
    assert (window.budget, window.pins) == (budget, pins)
    assert window == Window.of(budget, pins)


@pytest.mark.parametrize("prefix", [512, 513, 600])
def test_a_prefix_that_leaves_no_window_is_refused_with_both_sizes(prefix: int) -> None:
    with pytest.raises(BudgetError) as refusal:
        StreamingLLM(budget=512).window(prefix)
    assert str(refusal.value) == (
        f"the system prompt takes {prefix} tokens and the budget is 512; "
        f"raise the budget above {prefix} or shorten the prompt"
    )


def test_a_negative_prefix_is_refused() -> None:
    with pytest.raises(BudgetError, match="at least 0 tokens, got -1"):
        StreamingLLM(budget=512).window(-1)


@pytest.mark.parametrize("prefix", [0, 100])
def test_a_sliding_window_pins_nothing(prefix: int) -> None:
    assert SlidingWindow(budget=64).window(prefix) == Window.of(64, 0)


@pytest.mark.parametrize("policy", [SlidingWindow(budget=64), StreamingLLM(budget=64, sinks=4)])
def test_the_block_is_handed_on(policy: SlidingWindow | StreamingLLM) -> None:
    assert policy.window(block=7).block == 7


def test_full_has_no_window_and_no_block() -> None:
    assert Full(budget=64).window(10) is None
    with pytest.raises(UsageError, match="never evicts, so it has no block, got block=4"):
        Full(budget=64).window(block=4)
