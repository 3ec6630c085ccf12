"""What rows of one policy hold: which positions, in which slots, and what the policy remembers of them.

Knows the order of events, slots, and how far a key has to turn for the gaps to close. Does not know K and V, layers or
models. A row is one kv-head of one layer of one conversation. All rows here hold equally many tokens, so that a step is
a few operations on all of them, whatever layers they belong to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float32, Int64
from numpy.typing import NDArray

from headwater.errors import CacheStateError, UnsupportedModel
from headwater.policies import Policy, Slots
from headwater.policies.incremental import drop, step
from headwater.policies.signals import Signal

ROLLBACK = 64
"""So many of the newest tokens can be taken back, as long as nothing has left since they came."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """What a policy looked at after `seen` tokens, and every row of weights it has been shown since."""

    seen: int
    slots: Slots[Any]
    since: tuple[NDArray[np.float32] | None, ...] = ()


class Holdings:
    """`slots` is what the policy looks at, `where` the slot of every position, in the same order, and `written` the
    position, as the model counts them, at which the key in each slot was written."""

    def __init__(self, policy: Policy[Any], rows: int) -> None:
        self.policy, self.slot_count = policy, policy.budget + 1
        empty = np.empty((rows, 0), dtype=np.int64)
        self.slots: Slots[Any] = Slots(positions=empty, state=policy.signal.fresh(empty))
        self.where = empty
        self.written = np.zeros((rows, self.slot_count), dtype=np.int64)
        self.seen = 0
        self._marks = [Mark(seen=0, slots=self.slots)]

    @property
    def rows(self) -> int:
        return self.where.shape[0]

    @property
    def _each(self) -> Int64[np.ndarray, "rows 1"]:
        return np.arange(self.rows)[:, None]

    @property
    def held(self) -> int:
        """Tokens that lie in slots: the placed ones too, before they are observed."""
        return self.where.shape[1]

    def place(self, first: int, count: int) -> Int64[np.ndarray, "rows count"]:
        """The slots of the next tokens: behind the others while there is room, else where the last victims were.
        `first` is the position of the first of them, as the model counts."""
        held = self.held
        if held < self.slot_count - 1 or self.seen == held:
            new = np.broadcast_to(np.arange(held, held + count), (self.rows, count))
        else:  # one free slot a row
            new = self.slot_count * (self.slot_count - 1) // 2 - self.where.sum(axis=1, keepdims=True)
        self.where = np.concatenate((self.where, new), axis=1)
        self.written[self._each, new] = np.arange(first, first + count)
        return new

    def shifts(self, last: int) -> Int64[np.ndarray, "rows held"]:
        """How far the key in each slot in use has to turn, so that all lie one after another up to `last`."""
        wanted = np.empty_like(self.where)
        wanted[self._each, self.where] = np.arange(last - self.held + 1, last + 1)
        return wanted - self.written[:, : self.held]

    def observe(self, weights: Float32[np.ndarray, "rows count slots"]) -> Int64[np.ndarray, "rows held"] | None:
        """Show the policy what each of the placed tokens attended to, and let it evict.

        After several have left at once, what is held has to be laid into the first slots, in order: returns where it
        lies, and counts on it. Raises UnsupportedModel for weights that are no numbers.
        """
        self._check(weights)
        signal, evicts = self.policy.signal, self.held > self.policy.budget
        for index in range(weights.shape[1]):
            before = self.slots.positions.shape[1]
            given = weights[self._each, index, self.where[:, :before]] if signal.needs and before else None
            self.slots = step(signal, self.slots, self.seen, given)
            self.seen += 1
            if not evicts:
                self._remember(given)
        return self._evict() if evicts else None

    def take_prompt(
        self, first: int, count: int, weights: Float32[np.ndarray, "rows last positions"]
    ) -> Int64[np.ndarray, "rows held"]:
        """Pick from a whole prompt at once, by what its last tokens attended to; return the positions that stay.

        The policy is shown the same as if the tokens had come one by one and nothing had left before the last.
        """
        self._check(weights)
        signal, start = self.policy.signal, count - weights.shape[1]
        positions = np.broadcast_to(np.arange(start), (self.rows, start))
        slots: Slots[Any] = Slots(positions=positions, state=signal.fresh(positions))
        for index, position in enumerate(range(start, count)):
            slots = step(signal, slots, position, weights[:, index, :position] if position else None)
        self.slots = drop(signal, slots, self.policy.victims(slots, self.policy.budget))
        kept = self.slots.positions
        self.where, self.seen = np.broadcast_to(np.arange(kept.shape[1]), kept.shape), count
        self.written[:, : kept.shape[1]] = first + kept
        self._marks = [Mark(seen=count, slots=self.slots)]
        return kept

    def _check(self, weights: NDArray[np.float32]) -> None:
        if not np.isfinite(weights).all():
            raise UnsupportedModel(
                f"the model's attention is not a number, so {self.policy.name} cannot tell what to keep; try another "
                f"dtype, such as float32"
            )

    def _remember(self, given: NDArray[np.float32] | None) -> None:
        """Two marks at the most, `ROLLBACK` tokens apart: from one of them the way back is never longer than that."""
        self._marks = [replace(mark, since=(*mark.since, given)) for mark in self._marks]
        if len(self._marks[-1].since) >= ROLLBACK:
            self._marks = [self._marks[-1], Mark(seen=self.seen, slots=self.slots)]

    def check_rollback(self, count: int) -> None:
        """Raises CacheStateError when the newest `count` tokens cannot be taken back."""
        if count > (back := self.seen - self._marks[0].seen):
            raise CacheStateError(
                f"cannot roll back {count} tokens: the policy has learned from their attention, and remembers "
                f"what was before them for the newest {back} alone; at most {ROLLBACK} are sure, and none for which "
                f"another has left"
            )

    def rollback(self, count: int) -> None:
        """Take back the newest `count` tokens, exactly: the policy is shown again what came before them."""
        self.check_rollback(count)
        if not count:
            return
        target = self.seen - count
        mark = next(mark for mark in reversed(self._marks) if mark.seen <= target)
        shown = mark.since[: target - mark.seen]
        slots, signal = mark.slots, self.policy.signal
        for position, given in enumerate(shown, mark.seen):
            slots = step(signal, slots, position, given)
        self._marks = [replace(self._marks[0], since=self._marks[0].since[:-count])]
        self.slots, self.where, self.seen = slots, self.where[:, : self.held - count], target

    def _evict(self) -> NDArray[np.int64] | None:
        victims = self.policy.victims(self.slots, self.policy.budget)
        gone = int(victims[0].sum())
        self.slots = drop(self.policy.signal, self.slots, victims)
        self.where = self.where[~victims].reshape(self.rows, -1)
        if self.held > self.policy.budget:
            raise CacheStateError(f"{self.policy.name} left {self.held} tokens in a budget of {self.policy.budget}")
        self._marks = [Mark(seen=self.seen, slots=self.slots)]
        if gone <= 1:
            return None
        lay = self.where
        self.written[:, : self.held] = self.written[self._each, lay]
        self.where = np.broadcast_to(np.arange(self.held), lay.shape)
        return lay

    def restore(self, slots: Slots[Any], where: NDArray[np.int64], written: NDArray[np.int64], seen: int) -> None:
        """Be what was saved."""
        self.slots, self.where, self.seen = slots, where, seen
        self.written[:, : written.shape[1]] = written
        self._marks = [Mark(seen=seen, slots=slots)]

    def select(self, rows: NDArray[np.int64]) -> Holdings:
        """These rows, in this order, on their own."""
        out = Holdings(self.policy, 0)
        out.slots = self._select(self.slots, rows)
        out.where, out.written, out.seen = self.where[rows], self.written[rows], self.seen
        out._marks = [self._select_mark(mark, rows) for mark in self._marks]
        return out

    def _select(self, slots: Slots[Any], rows: NDArray[np.int64]) -> Slots[Any]:
        return Slots(positions=slots.positions[rows], state=self.policy.signal.select(slots.state, rows))

    def _select_mark(self, mark: Mark, rows: NDArray[np.int64]) -> Mark:
        since = tuple(None if given is None else given[rows] for given in mark.since)
        return replace(mark, slots=self._select(mark.slots, rows), since=since)

    def split(self, parts: int) -> list[Holdings]:
        """So many equal shares of the rows, each on its own."""
        return [self.select(rows) for rows in np.split(np.arange(self.rows), parts)]

    @classmethod
    def join(cls, parts: Sequence[Holdings]) -> Holdings:
        """What `split` took apart, after each part went the same way."""
        first = parts[0]
        out, signal = cls(first.policy, 0), first.policy.signal
        out.slots = _join(signal, [part.slots for part in parts])
        out.where = np.concatenate([part.where for part in parts])
        out.written = np.concatenate([part.written for part in parts])
        out.seen = first.seen
        out._marks = [
            Mark(
                seen=marks[0].seen,
                slots=_join(signal, [mark.slots for mark in marks]),
                since=tuple(_concat(given) for given in zip(*(mark.since for mark in marks), strict=True)),
            )
            for marks in zip(*(part._marks for part in parts), strict=True)
        ]
        return out


def _join(signal: Signal[Any], parts: Sequence[Slots[Any]]) -> Slots[Any]:
    positions = np.concatenate([part.positions for part in parts])
    return Slots(positions=positions, state=signal.join([part.state for part in parts]))


def _concat(given: Sequence[NDArray[np.float32] | None]) -> NDArray[np.float32] | None:
    """None where no row was shown anything: of a first token, nothing is."""
    there = [each for each in given if each is not None]
    return np.concatenate(there) if there else None
