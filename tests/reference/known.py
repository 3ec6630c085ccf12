"""The slow twin of `server.history.Known`: whole texts, compared one by one, over all sessions.

Known (fast)                                   here (slow)
1. hash every exchange with all before it      keep the texts
2. look the chain up in an index               compare the beginnings of every session
3. look the latest exchange up in an index     compare the ends of every session
4. look a first message up in an index         compare the first message of every session
Checked by hand in `tests/server/test_history.py`, case by case.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from headwater.server.history import FEWEST, MOST_HEARD, Exchange, History, Match


@dataclass
class Session:
    system: str | None
    said: list[tuple[str, str]] = field(default_factory=list)
    cut: bool = False
    used: int = 0


class SlowKnown:
    def __init__(self) -> None:
        self.sessions: dict[str, Session] = {}
        self.uses = 0

    def begin(self, session: str, system: str | None) -> None:
        self.sessions[session] = Session(system)
        self.touch(session)

    def said(self, session: str, exchange: Exchange, *, cut: bool = False) -> None:
        self.sessions[session].said.append((exchange.question.strip(), exchange.answer.strip()))
        self.sessions[session].cut = cut
        self.touch(session)

    def take_back(self, session: str, exchanges: int) -> None:
        one = self.sessions[session]
        one.said = one.said[: len(one.said) - exchanges]
        one.cut = False

    def forget(self, session: str) -> None:
        del self.sessions[session]

    def touch(self, session: str) -> None:
        self.uses += 1
        self.sessions[session].used = self.uses

    def match(self, history: History, *, busy: Collection[str] = ()) -> Match:
        asked = [(each.question.strip(), each.answer.strip()) for each in history.exchanges]
        count = len(asked)
        if not count:
            return Match(how="new")
        # The whole history; the whole of it but for the end; with something left out; a good part of it.
        ways = [(0, count), (1, count - 1), None, (count, count - MOST_HEARD)]
        for way in ways:
            found = self.shortened(history, asked, busy) if way is None else self.beginning(history, asked, busy, *way)
            if found is not None:
                return found
        (question, part), *_ = asked
        begun = [
            (-one.used, name)
            for name, one in self.sessions.items()
            if name not in busy and one.cut and len(one.said) == 1 and one.system == history.system
            if one.said[0][0] == question and one.said[0][1].startswith(part)
        ]
        if begun and count <= MOST_HEARD and history.lone_answer is None:
            return Match(how="edited", session=min(begun)[1], known=0, take_back=1)
        return Match(how="new")

    def beginning(
        self, history: History, asked: list[tuple[str, str]], busy: Collection[str], most: int, least: int
    ) -> Match | None:
        if history.lone_answer is not None:
            return None
        for known in range(len(asked), 0, -1):
            fitting = [
                (len(one.said) - known, -one.used, name)
                for name, one in self.sessions.items()
                if name not in busy and (one.system, one.said[:known]) == (history.system, asked[:known])
            ]
            if known >= least and fitting and min(fitting)[0] <= min(most, max(1, known)):
                back, _, name = min(fitting)
                return Match(how="edited" if back else "continued", session=name, known=known, take_back=back)
        return None

    def shortened(self, history: History, asked: list[tuple[str, str]], busy: Collection[str]) -> Match | None:
        found: dict[str, int] = {}
        for name, one in self.sessions.items():
            for back in (1, 0):
                said = one.said[: len(one.said) - back]
                if one.system == history.system and any(
                    lacks(said, asked, history.lone_answer, first) for first in range(len(asked))
                ):
                    found[name] = back
        if len(found) != 1 or set(found) & set(busy):
            return None
        ((name, back),) = found.items()
        return Match(how="shortened", session=name, known=len(asked), take_back=back)


def lacks(said: list[tuple[str, str]], asked: list[tuple[str, str]], lone: str | None, first: int) -> bool:
    """Whether `said` is the first `first` of `asked`, something that is left out, and the rest of `asked`."""
    rest = len(asked) - first
    out = len(said) - first - rest
    if out < 1 or rest < FEWEST or said[:first] != asked[:first] or said[len(said) - rest :] != asked[first:]:
        return False
    return lone is None or (first == 0 and said[out - 1][1] == lone.strip())
