"""The bookkeeping of a ring: which position lies in which slot.

Knows positions, slots and the window rule. Does not know tensors: whoever holds the K and V carries out the moves
that an eviction asks for. Pins lie in slots `0..pins-1` for ever; the window fills the slots after them without a
gap, in any order, because attention does not care about the order of what it has already seen. An eviction closes the
holes by moving the tokens of the last slots into them: one token copied per token evicted at the most, whatever the
window.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headwater.errors import CacheStateError, UsageError
from headwater.policies.window import Window


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """Slots to copy, `source[i]` to `target[i]`; no slot is in both."""

    source: tuple[int, ...] = ()
    target: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a step does when it ends: `evict` tokens held before it go; of the added ones the first `head` stay, the
    next `lost` go at once, and the last `tail` stay."""

    evict: int
    head: int
    lost: int = 0
    tail: int = 0


@dataclass(slots=True, kw_only=True)
class Ledger:
    """Positions and slots of one stream under a window; `seen` tokens fed, `gone` of them evicted."""

    window: Window
    seen: int = 0
    gone: int = 0
    evicted_at: int = 0
    """How many tokens had been seen when the last eviction happened: nothing before it can be rolled back."""
    slot_of: dict[int, int] = field(default_factory=dict)
    position_of: list[int] = field(default_factory=list)

    @property
    def held(self) -> int:
        return self.seen - self.gone

    @property
    def slots(self) -> int:
        """Slots that are ever in use at once: the budget, and the token whose step ends with an eviction."""
        return self.window.budget + 1

    @property
    def room(self) -> int:
        """Tokens that can still be attended in place in one step, evicting after it at the earliest."""
        return self.slots - self.held

    @property
    def kept(self) -> NDArray[np.int64]:
        """Positions held, ascending."""
        return np.sort(np.asarray(self.position_of, dtype=np.int64))

    @property
    def evictable(self) -> int:
        """Unpinned tokens held."""
        return max(0, self.held - self.window.pins)

    def append(self, count: int) -> None:
        """The next `count` tokens of the stream now lie in the slots after the last one."""
        for position in range(self.seen, self.seen + count):
            self.slot_of[position] = len(self.position_of)
            self.position_of.append(position)
        self.seen += count

    def evict(self, count: int) -> Moves:
        """Drop the `count` oldest unpinned tokens."""
        if not 0 <= count <= self.evictable:
            raise UsageError(
                f"cannot evict {count} tokens: {self.evictable} unpinned ones are held (held {self.held}, pinned "
                f"{min(self.held, self.window.pins)})"
            )
        if count == 0:
            return Moves()
        first = self.window.pins + self.gone
        moves = self._remove(range(first, first + count))
        self.gone += count
        self.evicted_at = self.seen
        return moves

    def plan(self, added: int) -> Plan:
        """What a step of `added` tokens will leave to do."""
        over = self.window.excess(self.held + added)
        if added <= self.room:
            return Plan(evict=over, head=added)
        head = min(added, max(0, self.window.pins - self.seen))
        old = min(over, self.evictable)
        lost = over - old
        return Plan(evict=old, head=head, lost=lost, tail=added - head - lost)

    def settle(self, plan: Plan) -> Moves:
        """Carry out the plan of a step; return the moves among the slots held before it (for a step whose tokens all
        fitted: among those and the new ones)."""
        if not (plan.lost or plan.tail):
            self.append(plan.head)
            return self.evict(plan.evict)
        moves = self.evict(plan.evict)
        self.append(plan.head)
        self.seen += plan.lost
        self.gone += plan.lost
        self.append(plan.tail)
        # The last eviction left budget + 1 - block tokens; what came after it can still be rolled back.
        self.evicted_at = self.seen - (self.held - (self.window.budget + 1 - self.window.block))
        return moves

    def rollback(self, count: int) -> Moves:
        """Take back the newest `count` tokens. Raises CacheStateError when they caused an eviction."""
        if not 0 <= count <= self.seen:
            raise UsageError(f"cannot roll back {count} tokens: {self.seen} were fed")
        if self.seen - count < self.evicted_at and count:
            raise CacheStateError(
                f"cannot roll back {count} tokens: tokens evicted when {self.evicted_at} had been fed would be needed "
                f"again; at most {self.seen - self.evicted_at} can be taken back"
            )
        moves = self._remove(range(self.seen - count, self.seen))
        self.seen -= count
        return moves

    def skip(self, positions: int) -> None:
        """Renumber the window as if `positions` more tokens had passed through it."""
        if positions < 0:
            raise UsageError(f"cannot skip {positions} positions; give 0 or more")
        if self.seen <= self.window.pins:
            raise UsageError("cannot skip positions before the window holds a token; feed more first")
        pins = self.window.pins
        self.position_of = [p if p < pins else p + positions for p in self.position_of]
        self.slot_of = {p: slot for slot, p in enumerate(self.position_of)}
        self.seen += positions
        self.gone += positions
        self.evicted_at = self.seen

    def _remove(self, positions: range) -> Moves:
        """Forget the positions and close the holes with the tokens of the last slots."""
        freed = sorted(self.slot_of.pop(position) for position in positions)
        kept = len(self.position_of) - len(freed)
        target = [slot for slot in freed if slot < kept]
        leaving = set(freed)
        source = [slot for slot in range(kept, len(self.position_of)) if slot not in leaving]
        for start, end in zip(source, target, strict=True):
            position = self.position_of[start]
            self.position_of[end] = position
            self.slot_of[position] = end
        del self.position_of[kept:]
        return Moves(source=tuple(source), target=tuple(target))
