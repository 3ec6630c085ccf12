"""The token ledger: every id that was fed, and which of them belong to which turn.

Knows positions and turns, and which whole exchanges make room. Does not know the cache, the model or the template. It
is the truth about the conversation: what the model was fed is never rendered or tokenised again to find it out.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """What left the cache: tokens, and turns of which nothing unpinned is held any more."""

    tokens: int = 0
    turns: int = 0

    def since(self, earlier: Gone) -> Gone:
        return Gone(tokens=self.tokens - earlier.tokens, turns=self.turns - earlier.turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One message with the template's tokens around it, at positions `[start, stop)` of the stream.

    `evicted` is what left the cache to make room for it; `finished` is False for an answer that was cut short; `when`
    is the time of day it ended, which makes no turn differ from another.
    """

    role: str
    text: str
    start: int
    stop: int
    evicted: Gone = Gone()
    finished: bool = True
    when: str = field(default="", compare=False)


@dataclass(slots=True, kw_only=True)
class Ledger:
    """Ids by position, and the turns in order: user, assistant, user, ... A head before the first turn is nobody's.

    Of a conversation that was taken up again only the latest part is here: the ids from position `base` on, `turns`
    after the first `past_turns`, and in `front` the ids of the first positions, which may be pinned.
    """

    ids: array[int] = field(default_factory=lambda: array("q"))
    turns: list[Turn] = field(default_factory=list)
    base: int = 0
    past_turns: int = 0
    front: array[int] = field(default_factory=lambda: array("q"))

    def __len__(self) -> int:
        return self.base + len(self.ids)

    @property
    def turn_count(self) -> int:
        """How many turns there were in all."""
        return self.past_turns + len(self.turns)

    def add(self, ids: Iterable[int]) -> None:
        self.ids.extend(ids)

    def take_back(self, count: int) -> None:
        """Forget the newest `count` ids."""
        del self.ids[len(self.ids) - count :]

    def between(self, start: int, stop: int) -> array[int]:
        """The ids of positions `[start, stop)`, none of them before `base`."""
        return self.ids[start - self.base : stop - self.base]

    def held(self, pins: int, first: int) -> NDArray[np.int64]:
        """The ids of the first `pins` positions and of those from `first` on."""
        front = self.front if self.base else self.ids
        return np.array(front[: min(pins, first)] + self.ids[first - self.base :], dtype=np.int64)

    def gone_turns(self, first: int) -> int:
        """How many turns ended before position `first`."""
        return self.past_turns + bisect_right(self.turns, first, key=lambda turn: turn.stop)


def leaving(turns: Sequence[Turn], *, first: int, need: int) -> tuple[Turn, ...]:
    """The whole exchanges that leave, oldest first, so that at least `need` tokens go.

    `first` is the oldest unpinned position held. A user message leaves together with its answer; an exchange whose
    answer is not complete stays, so the result can free less than `need`, or nothing.
    """
    closed = len(turns) // 2 * 2
    start = bisect_right(turns, first, hi=closed, key=lambda turn: turn.stop) // 2 * 2
    stop = start
    while need > 0 and stop < closed:
        stop += 2
        if turns[stop - 1].stop - first >= need:
            break
    return tuple(turns[start:stop])
