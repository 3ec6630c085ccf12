"""What every policy obeys, whatever its parameters, the attention it is shown and the moments it is asked to evict.

The laws run over the registry: a new policy is under them by its line there.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from headwater.errors import OverCapacity, UnsupportedCall
from headwater.policies import POLICIES, Incremental, Policy, PyramidKV
from headwater.policies.incremental import drop, start, step

KINDS: list[type[Policy[Any]]] = list(POLICIES.values())
LIVE = ("full", "sliding-window", "streaming-llm")
every_policy = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evict:
    """One eviction in the middle of a run, and what was so before and after it."""

    target: int
    before: list[int]
    protected: list[int]
    victims: list[int]
    after: list[int]
    again: list[int]


def draw_policy(data: st.DataObject, kind: type[Policy[Any]]) -> Policy[Any]:
    """Any parameters that the constructor accepts; small, so that everything happens within a few steps."""
    parameters = {"budget": data.draw(st.integers(1, 10), label="budget")}
    spare = parameters["budget"] - 1
    for name in [field.name for field in fields(kind) if field.name != "budget"]:
        if name in ("sinks", "recent_window"):
            parameters[name] = data.draw(st.integers(0, spare), label=name)
            spare -= parameters[name]
        elif name == "pool_kernel":
            parameters[name] = data.draw(st.sampled_from([1, 3, 5, 7]), label=name)
        elif name == "num_layers":
            parameters[name] = data.draw(st.integers(parameters["layer"] + 1, 5), label=name)
        else:
            parameters[name] = data.draw(st.integers(0 if name in ("layer", "seed") else 1, 4), label=name)
    try:
        return kind(**parameters)
    except ValueError:
        assume(False)
        raise


class Attention:
    """Weights with many ties, from one drawn seed: drawing them one by one would take minutes."""

    def __init__(self, data: st.DataObject) -> None:
        self._random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1), label="attention seed"))

    def row(self, held: int) -> list[float]:
        return self._random.choice([0.0, 0.0625, 0.125, 0.25, 0.5, 1.0], size=held).tolist()

    def row_or_none(self, held: int) -> list[float] | None:
        """None is a step without attention."""
        return None if self._random.random() < 0.2 else self.row(held)


def draw_budgets(data: st.DataObject, steps: int) -> list[int | None]:
    """What each step asks to evict to; None stands for the policy's own budget."""
    return data.draw(st.lists(st.none() | st.integers(0, 12), min_size=steps, max_size=steps), label="evict to")


def kept(row: Incremental[Any]) -> list[int]:
    return row.slots.positions[0].tolist()


def run(data: st.DataObject, policy: Policy[Any], steps: int = 16) -> list[Evict]:
    """Drive one row; evict when above the budget, and now and then to any other number."""
    row, evictions, attention = Incremental(policy), [], Attention(data)
    for position, asked in enumerate(draw_budgets(data, steps), start=1):
        if row.kept_count() == policy.capacity:
            break
        row.on_decode_step(position, attention.row_or_none(row.kept_count()))
        budget = policy.budget if asked is None else asked
        before, mask = kept(row), policy.protected(row.slots)[0]
        protected = [held for held, safe in zip(before, mask, strict=True) if safe]
        victims = row.evict(budget)
        after = kept(row)
        evictions.append(
            Evict(
                target=policy.target(budget),
                before=before,
                protected=protected,
                victims=victims,
                after=after,
                again=row.evict(budget),
            )
        )
        assert kept(row) == after
    return evictions


def victims_are_held_distinct_and_ascending(eviction: Evict) -> None:
    assert eviction.victims == sorted(set(eviction.victims))
    assert set(eviction.victims) <= set(eviction.before)
    assert eviction.after == [held for held in eviction.before if held not in eviction.victims]


def the_target_is_reached_and_not_one_more_goes(eviction: Evict) -> None:
    """As far as there are slots that may go; and nothing goes while all fits."""
    assert len(eviction.after) == min(len(eviction.before), max(eviction.target, len(eviction.protected)))


def protected_slots_survive(eviction: Evict) -> None:
    assert not set(eviction.protected) & set(eviction.victims)


def evicting_twice_equals_evicting_once(eviction: Evict) -> None:
    assert eviction.again == []


def keeps_the_laws(eviction: Evict) -> None:
    victims_are_held_distinct_and_ascending(eviction)
    the_target_is_reached_and_not_one_more_goes(eviction)
    protected_slots_survive(eviction)
    evicting_twice_equals_evicting_once(eviction)


@every_policy
@given(data=st.data())
def test_every_eviction_keeps_the_laws(kind: type[Policy[Any]], data: st.DataObject) -> None:
    for eviction in run(data, draw_policy(data, kind)):
        keeps_the_laws(eviction)


@every_policy
@given(data=st.data(), asked=st.integers(0, 12))
def test_what_is_asked_for_is_the_target_or_more(kind: type[Policy[Any]], data: st.DataObject, asked: int) -> None:
    """Only pyramidkv evicts below what it is asked to: down to the share of its layer."""
    policy = draw_policy(data, kind)
    share = min(asked, policy.effective) if isinstance(policy, PyramidKV) else asked
    assert policy.target(asked) == share <= asked


@pytest.mark.parametrize("kind", [k for k in KINDS if not k().needs], ids=lambda kind: kind.name)
@given(data=st.data())
def test_what_needs_no_attention_decides_the_same_when_shown_some(kind: type[Policy[Any]], data: st.DataObject) -> None:
    policy = draw_policy(data, kind)
    blind, shown, attention = Incremental(policy), Incremental(policy), Attention(data)
    for position, asked in enumerate(draw_budgets(data, 16), start=1):
        if blind.kept_count() == policy.capacity:
            break
        blind.on_decode_step(position, None)
        shown.on_decode_step(position, attention.row(shown.kept_count()))
        budget = policy.budget if asked is None else asked
        assert blind.evict(budget) == shown.evict(budget)
        assert kept(blind) == kept(shown)


@every_policy
@given(data=st.data())
def test_rows_decide_as_they_would_alone(kind: type[Policy[Any]], data: st.DataObject) -> None:
    """Two heads replayed at once give what two runs of one head give."""
    policy, attention = draw_policy(data, kind), Attention(data)
    together, alone = start(policy.signal, 2), [Incremental(policy) for _ in range(2)]
    for position in range(1, 13):
        held = together.positions.shape[1]
        if held == policy.capacity:
            break
        rows = [attention.row(held) for _ in alone]
        together = step(policy.signal, together, position, np.asarray(rows, dtype=np.float32))
        together = drop(policy.signal, together, policy.victims(together, policy.budget))
        for row, weights in zip(alone, rows, strict=True):
            row.on_decode_step(position, weights)
            row.evict(policy.budget)
        assert together.positions.tolist() == [kept(row) for row in alone]


@every_policy
@given(data=st.data())
def test_a_step_past_the_capacity_is_refused_by_name(kind: type[Policy[Any]], data: st.DataObject) -> None:
    policy = draw_policy(data, kind)
    row = Incremental(policy)
    for position in range(1, policy.capacity):
        row.on_decode_step(position, None)
    before = kept(row)
    with pytest.raises(RuntimeError, match=rf"{policy.name} .*budget of {policy.budget} tokens") as refusal:
        row.on_decode_step(policy.capacity, None)
    assert isinstance(refusal.value, OverCapacity)
    assert kept(row) == before


@pytest.mark.parametrize("kind", [POLICIES[name] for name in LIVE], ids=LIVE)
@given(data=st.data())
def test_the_live_window_keeps_what_the_rule_keeps(kind: type[Policy[Any]], data: st.DataObject) -> None:
    """With a block of 1, at every step."""
    policy = draw_policy(data, kind)
    window = policy.window(block=1) if policy.name != "full" else policy.window()
    row, live = Incremental(policy), [0]
    for position in range(1, 24 if window else policy.capacity):
        row.on_decode_step(position, None)
        row.evict(policy.budget)
        live.append(position)
        if window is not None:
            del live[window.pins : window.pins + window.excess(len(live))]
        assert kept(row) == live


@pytest.mark.parametrize("name", [name for name in POLICIES if name not in LIVE])
def test_a_policy_that_is_no_window_says_so_and_what_would_do(name: str) -> None:
    with pytest.raises(UnsupportedCall, match=rf"^{name} keeps no window .*; sliding-window and streaming-llm do$"):
        POLICIES[name]().window()
