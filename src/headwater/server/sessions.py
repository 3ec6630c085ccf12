"""The sessions of one key: which there are, which one a request means, and how it is brought to where the request is.

Knows the key's own database and what is known of every session in it. Does not know HTTP, other keys or how an answer
is generated. Everything here runs in the thread that drives the model.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from headwater.chat.journal import Entry, now
from headwater.chat.ledger import Turn
from headwater.chat.recalling import ALLOWANCE
from headwater.chat.sampling import Sampling
from headwater.chat.session import Chat
from headwater.chat.store import Said, Store, check_name
from headwater.engines.base import Engine
from headwater.errors import HeadwaterError, UnknownName, UsageError
from headwater.memory.base import Remembers
from headwater.policies import Policy
from headwater.server.history import Exchange, History, Known, Match, exchanges_of
from headwater.server.shelf import Live, Shelf

TITLE = 60
"""Characters of a session's first message that stand for it in a list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """How conversations are held, and answers generated where a request says nothing else."""

    policy: Policy[Any]
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int = 512
    memory_tokens: int = ALLOWANCE


class OtherHistory(HeadwaterError):
    """The session that a request names holds another conversation than the one it sends."""


class NoRoom(HeadwaterError):
    """One more conversation does not fit in memory now; nothing has changed."""


class TooManySessions(HeadwaterError):
    """A key has as many sessions as it may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A session that was brought to where a request is, but for its newest message. `computed` tokens were fed for
    that; `kept` is False for one that is to be deleted after the answer."""

    live: Live
    name: str
    how: str
    computed: int
    kept: bool = True


class Sessions:
    """`memory` remembers for all of them, if there is one."""

    def __init__(
        self,
        store: Store,
        engine: Engine,
        manner: Manner,
        shelf: Shelf,
        *,
        memory: Remembers | None = None,
        most: int = 10_000,
    ) -> None:
        self.store, self.engine, self.manner, self.shelf, self.memory = store, engine, manner, shelf, memory
        self.most = most
        self.known = Known()
        self._names: dict[str, str] = {}
        self._uids: dict[str, str] = {}
        self._titles: dict[str, str] = {}
        for said in store.said():
            self._name(said.uid, said.name)
            self._know(said)

    def __contains__(self, name: str) -> bool:
        return name in self._uids

    def __len__(self) -> int:
        return len(self._names)

    # Which one is meant.

    def wanted(self, named: str | None) -> bool:
        """Whether a session that is named can be taken now."""
        uid = None if named is None else self._uids.get(named)
        live = None if uid is None else self.shelf.get(uid)
        return live is None or not live.busy

    def take(
        self,
        history: History,
        *,
        named: str | None = None,
        whole: bool = False,
        kept: bool = True,
        alone: bool = False,
    ) -> Taken:
        """The session for a history, busy from now on. `alone` makes a new one whatever is known; `whole` is as in
        `Known.match_named`.

        Raises OtherHistory, NoRoom, TooManySessions, and what opening a conversation raises.
        """
        if named is not None:
            check_name(named)
        match = Match(how="new") if alone else self._match(history, named, whole)
        if match.session is None:
            return self._new(history, named, kept)
        return self._go_on(match, match.session, history)

    def _match(self, history: History, named: str | None, whole: bool) -> Match:
        busy = {uid for uid in self._names if (live := self.shelf.get(uid)) is not None and live.busy}
        if named is None:
            return self.known.match(history, busy=busy)
        if named not in self._uids:
            return Match(how="new")
        found = self.known.match_named(self._uids[named], history, whole=whole)
        if found is None:
            raise OtherHistory(
                f"session {named!r} holds another conversation than the one in messages; send what was said in it, or "
                "its newest message alone, or name another session"
            )
        return found

    def _go_on(self, match: Match, uid: str, history: History) -> Taken:
        """The session as the match says."""
        live = self.live(uid)
        before = live.chat.stats().fed
        if match.take_back:
            live.chat.take_back(match.take_back, again=True)
            self.known.take_back(uid, match.take_back)
        for exchange in history.exchanges[match.known :]:
            live.chat.hear(exchange.question, exchange.answer)
            self._add(uid, exchange)
        live.busy = True
        self.known.touch(uid)
        return Taken(live=live, name=self._names[uid], how=match.how, computed=live.chat.stats().fed - before)

    def _new(self, history: History, named: str | None, kept: bool) -> Taken:
        if len(self) >= self.most:
            raise TooManySessions(
                f"there are {len(self)} sessions and at most {self.most} are kept; delete some at /api/sessions"
            )
        if history.lone_answer is not None:
            raise UsageError("messages begin with an answer that belongs to no session here; begin with the user's")
        self._make_room()
        name = named or f"chat-{secrets.token_hex(6)}"
        opened = self.store.open(name, exist=False)
        try:
            if history.exchanges:
                chapter = opened.journal.begin(system=history.system, wording=None, head=None)
                with opened.journal.all_or_nothing():
                    for entry in _entries(history.exchanges):
                        opened.journal.add(chapter, entry)
            chat = self._open(opened, history.system)
        except BaseException:
            opened.close()
            self.store.delete(name)
            raise
        uid = opened.uid
        live = Live(uid=uid, chat=chat, busy=True)
        self.shelf.put(live)
        self._name(uid, name)
        self.known.begin(uid, history.system)
        for exchange in history.exchanges:
            self._add(uid, exchange)
        return Taken(live=live, name=name, how="new", computed=chat.stats().fed, kept=kept)

    def live(self, uid: str) -> Live:
        """A session in memory, from its snapshot when it was not there. Raises what opening it raises."""
        live = self.shelf.get(uid)
        if live is None:
            self._make_room()
            live = Live(uid=uid, chat=self._open(self.store.open(self._names[uid], create=False), None))
            self.shelf.put(live)
        return live

    def _make_room(self) -> None:
        if not self.shelf.make_room():
            raise NoRoom(self.shelf.trouble or "all conversations in memory are being answered")

    def _open(self, opened: Any, system: str | None) -> Chat:
        manner = self.manner
        return Chat.open(
            self.engine,
            session=opened,
            system=system,
            policy=manner.policy,
            sampling=manner.sampling,
            max_tokens=manner.max_tokens,
            memory=False if self.memory is None else self.memory,
            memory_tokens=manner.memory_tokens,
        )

    # Afterwards.

    def give_back(self, taken: Taken, question: str, *, asked: bool, left: bool) -> None:
        """The answer is over. `asked` says that the message was fed, `left` that the client was gone before the end."""
        live, latest = taken.live, taken.live.chat.latest
        live.busy = False
        if asked and latest is not None and latest.role == "assistant":
            self._add(live.uid, Exchange(question=question, answer=latest.text), cut=left)
        if not taken.kept or (not asked and taken.how == "new"):
            self.delete(taken.name)

    def drop(self, taken: Taken) -> None:
        """Something went wrong in the middle of a step: what the model holds is not trusted any more. The session is
        taken up from its journal when it is asked for again."""
        uid = taken.live.uid
        taken.live.busy = False
        try:
            self.shelf.close(uid)
        finally:
            self.reload(uid)

    def reload(self, uid: str) -> None:
        """Know of a session what its journal says."""
        for said in self.store.said():
            if said.uid == uid:
                self._know(said)

    def _know(self, said: Said) -> None:
        """A question without its answer has an empty one, which it gets when the session is taken up."""
        self.known.begin(said.uid, said.system)
        for exchange in exchanges_of([*said.texts, ""] if len(said.texts) % 2 else said.texts):
            self._add(said.uid, exchange)

    def _add(self, uid: str, exchange: Exchange, *, cut: bool = False) -> None:
        self.known.said(uid, exchange, cut=cut)
        if self.known.count(uid) == 1:
            self._titles[uid] = exchange.question.strip()[:TITLE]

    # Looking after them.

    def uid(self, name: str) -> str:
        """Raises UnknownName."""
        if name not in self._uids:
            raise UnknownName("session", name, list(self._uids)[-5:], also="those that /api/sessions lists")
        return self._uids[name]

    def name_of(self, uid: str) -> str | None:
        """What a session is called, if there is one."""
        return self._names.get(uid)

    def title(self, name: str) -> str:
        """How a session begins; empty for one that nobody said anything in, or of another process."""
        return self._titles.get(self._uids.get(name, ""), "")

    def rename(self, name: str, new: str) -> None:
        """Call a session something else. Raises UnknownName, UsageError; SessionBusy while it answers."""
        uid = self.uid(name)
        self._check_idle(uid, name)
        self.shelf.close(uid)
        self.store.rename(name, new)
        del self._uids[name]
        self._name(uid, new)

    def delete(self, name: str) -> None:
        """Delete a session for good. Raises UnknownName; UsageError while it answers."""
        uid = self.uid(name)
        self._check_idle(uid, name)
        self.shelf.close(uid)
        self.store.delete(name)
        self.known.forget(uid)
        del self._uids[name]
        del self._names[uid]
        self._titles.pop(uid, None)

    def _check_idle(self, uid: str, name: str) -> None:
        live = self.shelf.get(uid)
        if live is not None and live.busy:
            raise UsageError(f"session {name!r} is being answered; stop the answer first")

    def _name(self, uid: str, name: str) -> None:
        self._names[uid], self._uids[name] = name, uid


def sampled(manner: Manner, given: dict[str, Any]) -> Sampling:
    """The manner's sampling with what a request gives. Raises UsageError for values out of range."""
    return replace(manner.sampling, **given) if given else manner.sampling


def _entries(exchanges: Sequence[Exchange]) -> list[Entry]:
    """Turns that no model has read yet."""
    texts = [(role, text) for e in exchanges for role, text in (("user", e.question), ("assistant", e.answer))]
    return [
        Entry(
            number=number,
            turn=Turn(role=role, text=text, start=0, stop=0),
            ids=array("q"),
            gone_tokens=0,
            created=now(),
        )
        for number, (role, text) in enumerate(texts)
    ]
