"""The ledger against a list of positions: what is held, and that every position lies where the ledger says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.cache.ledger import Ledger, Moves
from headwater.errors import CacheStateError, UsageError
from headwater.policies.window import Window


class Shelf:
    """Slots that hold the position written into them: what a bank is, without tensors."""

    def __init__(self, window: Window) -> None:
        self.ledger = Ledger(window=window)
        self.slots: list[int | None] = [None] * (window.budget + 1)
        self.model: list[int] = []

    def move(self, moves: Moves) -> None:
        assert not set(moves.source) & set(moves.target)
        for source, target in zip(moves.source, moves.target, strict=True):
            self.slots[target] = self.slots[source]

    def step(self, count: int) -> None:
        ledger, plan = self.ledger, self.ledger.plan(count)
        first, wide = ledger.seen, count > ledger.room
        new = list(range(first, first + count))
        if not wide:
            self.slots[ledger.held : ledger.held + count] = new
        self.move(ledger.settle(plan))
        if wide:
            stay = new[: plan.head] + new[count - plan.tail :]
            self.slots[ledger.held - len(stay) : ledger.held] = stay
        self._settle_model(new)

    def _settle_model(self, new: list[int]) -> None:
        window = self.ledger.window
        for position in new:
            self.model.append(position)
            if len(self.model) > window.budget:
                del self.model[window.pins : window.pins + window.block]

    def check(self) -> None:
        ledger = self.ledger
        assert ledger.kept.tolist() == self.model
        assert ledger.held == len(self.model) <= ledger.window.budget
        assert self.slots[: ledger.held] == ledger.position_of
        assert all(ledger.position_of[slot] == p for p, slot in ledger.slot_of.items())
        pins = min(ledger.window.pins, ledger.held)
        assert ledger.position_of[:pins] == list(range(pins))


@st.composite
def windows(draw: st.DrawFn) -> Window:
    budget = draw(st.integers(1, 24))
    pins = draw(st.integers(0, budget - 1))
    return Window(budget=budget, pins=pins, block=draw(st.integers(1, budget - pins)))


@given(windows(), st.lists(st.integers(1, 60), max_size=12))
def test_any_cut_of_the_stream_holds_what_token_by_token_holds(window: Window, counts: list[int]) -> None:
    shelf = Shelf(window)
    for count in counts:
        shelf.step(count)
        shelf.check()


@given(windows(), st.data())
def test_evictions_and_rollbacks_in_between(window: Window, data: st.DataObject) -> None:
    shelf = Shelf(window)
    for _ in range(data.draw(st.integers(1, 12))):
        shelf.step(data.draw(st.integers(1, 30)))
        ledger = shelf.ledger
        if data.draw(st.booleans()):
            count = data.draw(st.integers(0, ledger.evictable))
            shelf.move(ledger.evict(count))
            del shelf.model[window.pins : window.pins + count]
        back = data.draw(st.integers(0, ledger.seen - ledger.evicted_at))
        shelf.move(ledger.rollback(back))
        del shelf.model[len(shelf.model) - back :]
        shelf.check()


@given(windows(), st.integers(1, 60), st.integers(1, 60))
def test_what_can_be_rolled_back_is_exactly_what_came_after_the_last_eviction(
    window: Window, first: int, second: int
) -> None:
    whole, cut = Ledger(window=window), Ledger(window=window)
    whole.settle(whole.plan(first + second))
    for _ in range(first + second):
        cut.settle(cut.plan(1))
    assert whole.evicted_at == cut.evicted_at
    with pytest.raises((CacheStateError, UsageError)):
        whole.rollback(whole.seen - whole.evicted_at + 1)


def test_an_eviction_moves_at_most_as_many_tokens_as_it_drops() -> None:
    ledger = Ledger(window=Window(budget=4096, pins=4, block=256))
    ledger.settle(ledger.plan(4097))
    for _ in range(5000):
        moves = ledger.settle(ledger.plan(1))
        assert len(moves.source) <= 256


def test_skipping_renumbers_the_window_and_not_the_pins() -> None:
    ledger = Ledger(window=Window(budget=6, pins=2, block=1))
    ledger.settle(ledger.plan(9))
    ledger.skip(100)
    assert ledger.kept.tolist() == [0, 1, 105, 106, 107, 108]
    ledger.settle(ledger.plan(1))
    assert ledger.kept.tolist() == [0, 1, 106, 107, 108, 109]


def test_mistakes_are_named() -> None:
    ledger = Ledger(window=Window(budget=6, pins=2, block=1))
    with pytest.raises(UsageError, match="more first"):
        ledger.skip(5)
    ledger.settle(ledger.plan(5))
    with pytest.raises(UsageError, match="cannot evict 4 tokens: 3 unpinned"):
        ledger.evict(4)
    with pytest.raises(UsageError, match="cannot roll back 6 tokens: 5 were fed"):
        ledger.rollback(6)
    with pytest.raises(UsageError, match="cannot skip -1"):
        ledger.skip(-1)
