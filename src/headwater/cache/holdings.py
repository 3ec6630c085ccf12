"""What rows of one policy hold: which positions, in which slots, and what the policy remembers of them.

Knows the order of events, slots, and how far a key has to turn for the gaps to close. Does not know K and V, layers or
models. A row is one kv-head of one layer of one conversation. All rows here hold equally many tokens, so that a step is
a few operations on all of them, whatever layers they belong to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float32, Int64
from numpy.typing import NDArray

from headwater.errors import CacheStateError
from headwater.policies import Policy, Slots
from headwater.policies.incremental import drop, step


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

    @property
    def rows(self) -> int:
        return self.where.shape[0]

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
        np.put_along_axis(self.written, new, np.arange(first, first + count)[None], axis=1)
        return new

    def shifts(self, last: int) -> Int64[np.ndarray, "rows held"]:
        """How far the key in each slot in use has to turn, so that all lie one after another up to `last`."""
        wanted = np.empty_like(self.where)
        np.put_along_axis(wanted, self.where, np.arange(last - self.held + 1, last + 1)[None], axis=1)
        return wanted - self.written[:, : self.held]

    def observe(self, weights: Float32[np.ndarray, "rows count slots"]) -> Int64[np.ndarray, "rows held"] | None:
        """Show the policy what each of the placed tokens attended to, and let it evict.

        After several have left at once, what is held has to be laid into the first slots, in order: returns where it
        lies, and counts on it.
        """
        signal = self.policy.signal
        for index in range(weights.shape[1]):
            before = self.slots.positions.shape[1]
            if signal.needs and before:
                given = np.take_along_axis(weights[:, index], self.where[:, :before], axis=1)
            else:
                given = None
            self.slots = step(signal, self.slots, self.seen, given)
            self.seen += 1
        return self._evict() if self.held > self.policy.budget else None

    def _evict(self) -> NDArray[np.int64] | None:
        victims = self.policy.victims(self.slots, self.policy.budget)
        gone = int(victims[0].sum())
        self.slots = drop(self.policy.signal, self.slots, victims)
        self.where = self.where[~victims].reshape(self.rows, -1)
        if self.held > self.policy.budget:
            raise CacheStateError(f"{self.policy.name} left {self.held} tokens in a budget of {self.policy.budget}")
        if gone <= 1:
            return None
        lay = self.where
        self.written[:, : self.held] = np.take_along_axis(self.written, lay, axis=1)
        self.where = np.broadcast_to(np.arange(self.held), lay.shape)
        return lay

    def select(self, rows: NDArray[np.int64]) -> Holdings:
        """These rows, in this order, on their own."""
        out = Holdings(self.policy, 0)
        state = self.policy.signal.select(self.slots.state, rows)
        out.slots = Slots(positions=self.slots.positions[rows], state=state)
        out.where, out.written, out.seen = self.where[rows], self.written[rows], self.seen
        return out

    def split(self, parts: int) -> list[Holdings]:
        """So many equal shares of the rows, each on its own."""
        return [self.select(rows) for rows in np.split(np.arange(self.rows), parts)]

    @classmethod
    def join(cls, parts: Sequence[Holdings]) -> Holdings:
        """What `split` took apart, after each part went the same way."""
        first = parts[0]
        out = cls(first.policy, 0)
        state = first.policy.signal.join([part.slots.state for part in parts])
        out.slots = Slots(positions=np.concatenate([part.slots.positions for part in parts]), state=state)
        out.where = np.concatenate([part.where for part in parts])
        out.written = np.concatenate([part.written for part in parts])
        out.seen = first.seen
        return out
