"""The conversations that are in memory now: as many as fit a limit, of all keys together.

Knows how much each takes and which was used last. Does not know whose they are. One that has to go is saved first, and
comes back from its snapshot when it is asked for; one whose messages the disk does not take stays.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from headwater.chat.session import Chat
from headwater.errors import HeadwaterError

MOST = 64
"""Conversations in memory at once, however small they are."""


@dataclass(slots=True, kw_only=True, eq=False)
class Live:
    """A conversation in memory. `busy` while an answer is generated in it; `surprise` is that of the last one, in nats
    a token."""

    uid: str
    chat: Chat
    busy: bool = False
    surprise: float | None = None


@dataclass(slots=True, kw_only=True)
class Shelf:
    """`session_bytes` is what one more may take; the busy ones stay, whatever the limit. `most` bounds their number:
    each has files open."""

    limit_bytes: int
    session_bytes: int
    most: int = MOST
    saved: int = 0
    trouble: str | None = None
    _live: OrderedDict[str, Live] = field(default_factory=OrderedDict)

    @property
    def nbytes(self) -> int:
        """Bytes of all caches."""
        return sum(max(live.chat.stats().cache_bytes, 0) for live in self._live.values())

    def __len__(self) -> int:
        return len(self._live)

    @property
    def busy(self) -> int:
        """How many are being answered."""
        return sum(live.busy for live in self._live.values())

    def all(self) -> list[Live]:
        """Every conversation in memory, the one used longest ago first."""
        return list(self._live.values())

    def peek(self, uid: str) -> Live | None:
        """The conversation, if it is in memory; that it was looked at is no use of it."""
        return self._live.get(uid)

    def get(self, uid: str) -> Live | None:
        """The conversation, if it is in memory; it is the one used last now."""
        live = self._live.get(uid)
        if live is not None:
            self._live.move_to_end(uid)
        return live

    def put(self, live: Live) -> None:
        """Have one more."""
        self._live[live.uid] = live

    def make_room(self) -> bool:
        """Save and close the idle ones used longest ago, until one more fits. False when it still does not, unless none
        is busy: one conversation is always allowed."""
        for uid, live in list(self._live.items()):
            if self._fits:
                break
            if live.busy:
                continue
            try:
                live.chat.save()
            except HeadwaterError as error:
                self.trouble = str(error)
                continue
            self.trouble = None
            del self._live[uid]
            live.chat.close()
            self.saved += 1
        return self._fits or not self._live

    @property
    def _fits(self) -> bool:
        return len(self) < self.most and self.nbytes + self.session_bytes <= self.limit_bytes

    def close(self, uid: str) -> None:
        """Give one back, saved as far as it can be. Raises StoreError when messages of it could not be written."""
        live = self._live.pop(uid, None)
        if live is not None:
            live.chat.close()

    def close_all(self) -> list[str]:
        """Give all back; what went wrong, in words."""
        said = []
        for uid in list(self._live):
            try:
                self.close(uid)
            except HeadwaterError as error:
                said.append(str(error))
        return said
