"""Knowing a conversation again: which session a client means that sends everything that was said, every time.

Knows messages, their digests and what of a session a request repeats. Does not know HTTP, models, caches or the disk.

A session is a chain: every exchange (a message and its answer) hashed with all before it, from the system prompt on. A
request whose history is the whole chain of a session goes on with it, whatever of that has long left the cache. A
history that leaves the chain near its end was edited there. One that lacks the oldest exchanges, or some after the
first ones, is known by its latest. White space around a message does not tell messages apart: clients trim it.

Nobody is given a session that holds what they did not send, save what a client leaves out of a history of which it
sends at least the latest `FEWEST` exchanges, and then only when no other session could be meant.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Literal

FEWEST = 2
"""Exchanges that must follow one another up to the end of a session, for a history that lacks its oldest ones."""
MOST_HEARD = 8
"""Exchanges that a session is told of after the part that it knows; a history with more is a new one."""

How = Literal["new", "continued", "shortened", "edited"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """A message and its answer."""

    question: str
    answer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What a client says was said so far. `lone_answer` is an answer whose message was left out before all of it."""

    system: str | None
    exchanges: tuple[Exchange, ...] = ()
    lone_answer: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """What to do with a history: `session` has its first `known` exchanges (or those that it did not leave out), once
    it has taken back its newest `take_back`; the rest it has to be told."""

    how: How
    session: str | None = None
    known: int = 0
    take_back: int = 0


@dataclass(slots=True)
class _Session:
    """`chain[i]` stands for the system prompt and the first `i` exchanges. `cut` is the one answer so far, when the
    client left before its end."""

    chain: list[bytes]
    pairs: list[bytes] = field(default_factory=list)
    answers: list[bytes] = field(default_factory=list)
    cut: str | None = None
    used: int = 0

    def __len__(self) -> int:
        return len(self.pairs)


class Known:
    """The sessions of one client, or of all who share a key."""

    def __init__(self) -> None:
        self._sessions: dict[str, _Session] = {}
        self._at: defaultdict[bytes, set[str]] = defaultdict(set)
        self._ends: defaultdict[bytes, set[str]] = defaultdict(set)
        self._cut: defaultdict[bytes, set[str]] = defaultdict(set)
        self._uses = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, session: str) -> bool:
        return session in self._sessions

    def count(self, session: str) -> int:
        """How many exchanges a session has."""
        return len(self._sessions[session])

    # What was said.

    def begin(self, session: str, system: str | None) -> None:
        """A session with nothing said yet, in the place of one of that name."""
        self.forget(session)
        self._sessions[session] = _Session([_start(system)])
        self.touch(session)

    def said(self, session: str, exchange: Exchange, *, cut: bool = False) -> None:
        """An exchange was had. `cut` says that the client left before the answer's end, so it may have less of it."""
        self.touch(session)
        one = self._sessions[session]
        self._index(session, one, discard=True)
        pair = _pair(exchange)
        one.pairs.append(pair)
        one.answers.append(_digest("answer", exchange.answer.strip()))
        one.chain.append(_digest_of(one.chain[-1], pair))
        self._at[one.chain[-1]].add(session)
        one.cut = exchange.answer.strip() if cut and len(one) == 1 else None
        self._index(session, one, question=exchange.question)

    def take_back(self, session: str, exchanges: int) -> None:
        """The newest exchanges are to be forgotten."""
        one = self._sessions[session]
        self._index(session, one, discard=True)
        for _ in range(exchanges):
            _drop(self._at, one.chain.pop(), session)
            one.pairs.pop()
            one.answers.pop()
        one.cut = None
        self._index(session, one)

    def forget(self, session: str) -> None:
        """There is no such session any more."""
        one = self._sessions.pop(session, None)
        if one is None:
            return
        self._index(session, one, discard=True)
        for link in one.chain:
            _drop(self._at, link, session)

    def touch(self, session: str) -> None:
        """It is the one used last."""
        self._uses += 1
        self._sessions[session].used = self._uses

    # Who is meant.

    def match(self, history: History, *, busy: Collection[str] = ()) -> Match:
        """The session that a history belongs to, without those that are `busy`."""
        asked = _Asked.of(history)
        return self._match(asked, busy) if asked.pairs else Match(how="new")

    def match_named(self, session: str, history: History, *, whole: bool = False) -> Match | None:
        """What a history is to the session that the client names; None when it is another conversation.

        A history with nothing but the newest message is that of a client that leaves all the rest to the server, unless
        it says that it sends the `whole` of it. Then the session takes back whatever is not in it.
        """
        asked, one = _Asked.of(history), self._sessions[session]
        if (whole or history.system is not None) and one.chain[0] != asked.chain[0]:
            return None
        if whole and history.lone_answer is None:
            alike = [ours == theirs for ours, theirs in zip(one.chain, asked.chain, strict=False)]
            back = len(one) - (sum(alike) - 1)
            return Match(how="edited" if back else "continued", session=session, known=sum(alike) - 1, take_back=back)
        if not asked.pairs:
            return Match(how="continued", session=session) if history.lone_answer is None else None
        others = self._sessions.keys() - {session}
        for system in (asked, asked.under(one.chain[0])):
            found = self._match(system, others)
            if found.session == session:
                return found
        return None

    def _match(self, asked: _Asked, busy: Collection[str]) -> Match:
        count = len(asked.pairs)
        return (
            self._edited(asked, busy, most_back=0, least=count)
            or self._edited(asked, busy, most_back=1, least=count - 1)
            or self._shortened(asked, busy)
            or self._edited(asked, busy, most_back=count, least=count - MOST_HEARD)
            or self._begun(asked, busy)
            or Match(how="new")
        )

    def _edited(self, asked: _Asked, busy: Collection[str], *, most_back: int, least: int) -> Match | None:
        """The session with the longest beginning of the history, and the least after it; of equals the one used last.

        It gives back no more exchanges than it keeps, one at the least, so that a common opening is not worth the end
        of a long conversation.
        """
        if asked.lone_answer is not None:
            return None
        count = len(asked.pairs)
        for known in range(count, max(least, 1) - 1, -1):
            sessions = [
                (name, self._sessions[name]) for name in self._at.get(asked.chain[known], ()) if name not in busy
            ]
            found = [(len(one) - known, -one.used, name) for name, one in sessions]
            back, _, name = min(found, default=(count + 1, 0, ""))
            if back <= min(most_back, max(1, known)):
                return Match(how="edited" if back else "continued", session=name, known=known, take_back=back)
        return None

    def _shortened(self, asked: _Asked, busy: Collection[str]) -> Match | None:
        """The one session that ends with what the history ends with; None when it could be several."""
        found: list[Match] = []
        for name in self._ends.get(asked.pairs[-1], ()):
            one = self._sessions[name]
            found += [
                Match(how="shortened", session=name, known=len(asked.pairs), take_back=back)
                for back in (0, 1)
                if one.chain[0] == asked.chain[0] and _lacks_only_older(one, asked, len(one) - back)
            ]
        if len({each.session for each in found}) != 1 or found[0].session in busy:
            return None
        return found[0]

    def _begun(self, asked: _Asked, busy: Collection[str]) -> Match | None:
        """A session whose first answer was cut, of which the client has the beginning."""
        if asked.first is None or len(asked.pairs) > MOST_HEARD or asked.lone_answer is not None:
            return None
        part = asked.first.answer.strip()
        found = [
            (-one.used, name)
            for name in self._cut.get(_begins(asked.chain[0], asked.first.question), ())
            if name not in busy and ((one := self._sessions[name]).cut or "").startswith(part)
        ]
        return Match(how="edited", session=min(found)[1], known=0, take_back=1) if found else None

    def _index(self, session: str, one: _Session, *, discard: bool = False, question: str = "") -> None:
        """The last two exchanges, by which a history without its oldest ones is found, and a first answer that was
        cut."""
        if discard and one.cut is not None:
            for key in [key for key, names in self._cut.items() if session in names]:
                _drop(self._cut, key, session)
        elif one.cut is not None:
            self._cut[_begins(one.chain[0], question)].add(session)
        for pair in one.pairs[-2:]:
            if discard:
                _drop(self._ends, pair, session)
            else:
                self._ends[pair].add(session)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """A history, hashed."""

    first: Exchange | None
    chain: tuple[bytes, ...]
    pairs: tuple[bytes, ...]
    lone_answer: bytes | None

    @classmethod
    def of(cls, history: History) -> _Asked:
        lone = history.lone_answer
        return cls._hashed(
            _start(history.system),
            history.exchanges[0] if history.exchanges else None,
            tuple(map(_pair, history.exchanges)),
            None if lone is None else _digest("answer", lone.strip()),
        )

    def under(self, start: bytes) -> _Asked:
        """The same after another system prompt."""
        return self._hashed(start, self.first, self.pairs, self.lone_answer)

    @classmethod
    def _hashed(cls, start: bytes, first: Exchange | None, pairs: tuple[bytes, ...], lone: bytes | None) -> _Asked:
        chain = [start]
        for pair in pairs:
            chain.append(_digest_of(chain[-1], pair))
        return cls(first=first, chain=tuple(chain), pairs=pairs, lone_answer=lone)


def _lacks_only_older(one: _Session, asked: _Asked, end: int) -> bool:
    """Whether the history is what the session has up to exchange `end`, without some of the older ones: its latest
    ones are the session's latest, and what comes before those is how the session begins."""
    count = len(asked.pairs)
    if count >= end:
        return False
    run = 0
    while run < count and one.pairs[end - 1 - run] == asked.pairs[count - 1 - run]:
        run += 1
    if run < FEWEST:
        return False
    if asked.lone_answer is not None:
        return run == count and one.answers[end - 1 - run] == asked.lone_answer
    return list(asked.pairs[: count - run]) == one.pairs[: count - run]


def _start(system: str | None) -> bytes:
    return _digest("no system" if system is None else "system", (system or "").strip())


def _pair(exchange: Exchange) -> bytes:
    return _digest("exchange", exchange.question.strip(), exchange.answer.strip())


def _begins(start: bytes, question: str) -> bytes:
    return _digest_of(start, _digest("asked", question.strip()))


def _digest(kind: str, *texts: str) -> bytes:
    return _digest_of(kind.encode(), *(text.encode("utf-8", "surrogatepass") for text in texts))


def _digest_of(*parts: bytes) -> bytes:
    """A digest of the parts and of where each ends."""
    out = blake2b(digest_size=16)
    for part in parts:
        out.update(len(part).to_bytes(8, "little"))
        out.update(part)
    return out.digest()


def _drop(index: defaultdict[bytes, set[str]], key: bytes, session: str) -> None:
    names = index.get(key)
    if names is not None:
        names.discard(session)
        if not names:
            del index[key]


def exchanges_of(texts: Sequence[str]) -> tuple[Exchange, ...]:
    """Messages and answers in turn, as exchanges."""
    return tuple(Exchange(question=q, answer=a) for q, a in zip(texts[::2], texts[1::2], strict=True))
