"""Objects of the incremental contract under the harness: those that keep to it, and every way of breaking it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from headwater.errors import BudgetError, PolicyFault, UnsupportedCall
from headwater.policies import Incremental, policy
from headwater.policies.incremental import start
from headwater.traces import ArrayTrace, canonical_trace, replay, replay_incremental
from tests.reference import replay_policies as twins


@pytest.mark.parametrize("name", sorted(twins.POLICIES))
def test_an_object_that_is_brought_is_replayed_as_the_policy_is(name: str) -> None:
    """The twins know nothing of this library."""
    trace = canonical_trace(tokens=300)
    ours = replay(trace, name, budget=64)
    out = replay_incremental(trace, lambda: twins.POLICIES[name](budget=64), budget=64, name="mine", chunk_bytes=9999)
    assert np.array_equal(out.left, ours.left)
    assert np.array_equal(out.mass, ours.mass)
    assert np.array_equal(out.hits, ours.hits)
    assert np.array_equal(out.evictions, ours.evictions)
    assert (out.policy.name, out.policy.budget, out.way) == ("mine", 64, "rule")


def test_every_row_has_an_object_of_its_own() -> None:
    trace = ArrayTrace(np.random.default_rng(0).random((3, 40, 40)))
    out = replay_incremental(trace, lambda: Incremental(policy("tova", budget=9)), budget=9)
    assert np.array_equal(out.left, replay(trace, "tova", budget=9).left)
    assert len({tuple(row) for row in out.left.tolist()}) == 3


def test_it_has_no_rule_to_be_asked() -> None:
    out = replay_incremental(canonical_trace(tokens=9), lambda: twins.SlidingWindow(budget=4), budget=4)
    with pytest.raises(UnsupportedCall, match="it has no rule"):
        out.policy.victims(start(out.policy.signal, 1), 0)


@pytest.mark.parametrize("budget", [0, -1, True, 2.0])
def test_a_budget_is_a_number_of_tokens(budget: int) -> None:
    with pytest.raises(BudgetError, match=r"mine: budget must be"):
        replay_incremental(canonical_trace(tokens=9), lambda: twins.SlidingWindow(), budget=budget, name="mine")


class Broken(twins.SlidingWindow):
    """A window of 3 that answers something else at step 5, where it should give back position 2."""

    def __init__(self, answer: Callable[[list[int]], Any]) -> None:
        super().__init__(budget=3)
        self.answer = answer

    def evict(self, budget: int) -> Any:
        gone = super().evict(budget)
        return self.answer(gone) if gone == [2] else gone


FAULTS = [
    # what it answers in place of [2], and what is said of it
    ([2, 2], "mine: victim 2 is not held at step 5, row 0; it left after step 5"),
    ([1], "mine: victim 1 is not held at step 5, row 0; it left after step 4"),
    ([6], "mine: victim 6 is not held at step 5, row 0; it was not seen yet"),
    ([-1], r"mine: a victim is an integer in 0\.\.8, got -1 at step 5, row 0"),
    ([9], r"mine: a victim is an integer in 0\.\.8, got 9 at step 5, row 0"),
    ([2.0], r"mine: a victim is an integer in 0\.\.8, got 2\.0 at step 5, row 0"),
    ([True], r"mine: a victim is an integer in 0\.\.8, got True at step 5, row 0"),
    (["2"], r"mine: a victim is an integer in 0\.\.8, got '2' at step 5, row 0"),
    ([], "mine: 4 positions are held after the eviction of step 5, row 0; the budget is 3"),
    ([2, 3], r"mine: kept_count\(\) says 3 after step 5, row 0, and 2 positions are held"),
]


@pytest.mark.parametrize(("answer", "said"), FAULTS, ids=[str(answer) for answer, _ in FAULTS])
def test_an_answer_that_breaks_the_contract_is_refused(answer: list[Any], said: str) -> None:
    trace = canonical_trace(tokens=9)
    with pytest.raises(PolicyFault, match=said):
        replay_incremental(trace, lambda: Broken(lambda gone: answer), budget=3, name="mine")
    out = replay_incremental(trace, lambda: Broken(lambda gone: np.array(gone)), budget=3)
    assert out.eviction_calls == 6
