"""Notes on what left the cache: two lines for every lot of exchanges, written by the model itself while it is idle.

Knows which exchanges have no note yet, how one is asked for, and when the notes are put before a message again. Does
not know when the model is idle, nor where notes are stored. The notes are in the cache all the time, as far as their
allowance goes, but in no fixed place: they leave with the message that they came with, and come again with the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

from headwater.chat.conversation import Conversation
from headwater.chat.recalling import Earlier, exchanges
from headwater.chat.sampling import Sampler, Sampling
from headwater.chat.template import Template
from headwater.engines.base import Engine

ALLOWANCE = 128
"""Tokens that notes may take before a message."""
LOT = 256
"""Tokens of exchanges that one note is about."""
LONGEST = 48
"""Tokens of a note."""
LINES = 2
FURTHEST = 64
"""Exchanges that can be waiting for a note; of a longer past, the latest."""
PIECE = 64
"""Tokens fed at once: what a message that comes meanwhile waits for."""

REQUEST = "Summarize this conversation in two short lines. Keep names, numbers and references.\n\n"
OPENING, CLOSING = "Notes on what was said before:\n", "\n"
CUT = " … "


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """What was said in the exchanges from `first` to `last`, counted from 1."""

    first: int
    last: int
    text: str


class Notes:
    """One conversation's notes; `keep` is told each new one, and `written` are those that exist already.

    `brought` are those that came with the last message. `trouble` says what failed.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        allowance: int,
        earlier: Earlier | None = None,
        keep: Callable[[Note], None] = lambda note: None,
        written: Sequence[Note] = (),
    ) -> None:
        self.allowance, self.written, self.brought, self.trouble = allowance, list(written), (), None
        self.written: list[Note]
        self.brought: tuple[Note, ...]
        self.trouble: str | None
        self._engine, self._earlier, self._keep = engine, earlier, keep
        self._work: Iterator[None] | None = None
        self._standing: tuple[int, tuple[Note, ...]] | None = None

    # Writing.

    def write(self, talk: Conversation, stop: Callable[[], bool]) -> bool:
        """Write notes on what has left until all is done, or `stop` says so; whether all is done. A step of the model
        at a time; what was begun goes on the next time."""
        try:
            while not stop():
                if self._work is None:
                    lot = self._lot(talk)
                    if not lot:
                        return True
                    self._work = self._writing(lot)
                if next(self._work, self) is self:
                    self._work = None
        except Exception as error:
            self._work = None
            self.trouble = f"no notes on what left: {error or type(error).__name__}"
            return True
        return False

    def _lot(self, talk: Conversation) -> list[tuple[int, str]]:
        """The next exchanges to write on, with their numbers, when enough have left."""
        gone = talk.gone.turns // 2
        first = max(self.written[-1].last if self.written else 0, gone - FURTHEST)
        lot: list[tuple[int, str]] = []
        tokens = 0
        for number, (asked, answered) in enumerate(exchanges(talk, self._earlier, first, gone), start=first + 1):
            text = f"User: {asked.text.strip()}\nAssistant: {answered.text.strip()}\n"
            count = len(self._engine.encode(text))
            if lot and tokens + count > LOT:
                return lot
            lot.append((number, text))
            tokens += count
        return lot if tokens >= LOT else []

    def _writing(self, lot: Sequence[tuple[int, str]]) -> Iterator[None]:
        """Ask the model for a note, a step at a time."""
        engine = self._engine
        template = Template.derive(engine, None)
        asked = REQUEST + self._shortened("".join(text for _, text in lot))
        ids = [*template.head, *template.question(engine, asked, first=True)]
        sampler = Sampler(Sampling(temperature=0))
        said: list[int] = []
        with closing(engine.open(None, limit_tokens=len(ids) + LONGEST)) as stream:
            for start in range(0, len(ids), PIECE):
                logits = stream.feed(ids[start : start + PIECE])
                yield
            while len(said) < LONGEST:
                token = sampler.draw(logits, said)  # pyright: ignore[reportPossiblyUnboundVariable]
                if token in engine.stop_tokens:
                    break
                said.append(token)
                if len(_lines(engine.decode(said))) > LINES:
                    break
                logits = stream.feed([token])
                yield
        note = Note(first=lot[0][0], last=lot[-1][0], text="\n".join(_lines(engine.decode(said))[:LINES]))
        self.written.append(note)
        self._keep(note)
        self.trouble = None if note.text else f"the model wrote nothing on turns {note.first} to {note.last}"

    def _shortened(self, text: str) -> str:
        """A lot that is one long exchange, without its middle."""
        ids = self._engine.encode(text)
        if len(ids) <= 2 * LOT:
            return text
        return self._engine.decode(ids[:LOT]) + CUT + self._engine.decode(ids[-LOT:])

    # Bringing.

    def bring(self, talk: Conversation) -> str:
        """What goes before a message: the latest notes within the allowance, or nothing while they are still there and
        at most half of them would be new."""
        self.brought = ()
        if self._standing is not None and self._standing[0] < talk.first:
            self._standing = None
        chosen = self._chosen()
        standing = () if self._standing is None else self._standing[1]
        if not chosen or 2 * sum(note not in standing for note in chosen) <= len(chosen):
            return ""
        self.brought = chosen
        self._standing = len(talk.ledger), chosen
        return _block(chosen)

    def stand(self, position: int, brought: Sequence[Note]) -> None:
        """These came with the message at this position, before the conversation was taken up again."""
        self._standing = position, tuple(brought)

    def _chosen(self) -> tuple[Note, ...]:
        chosen: tuple[Note, ...] = ()
        for note in reversed([note for note in self.written if note.text]):
            if len(self._engine.encode(_block((note, *chosen)))) > self.allowance:
                break
            chosen = (note, *chosen)
        return chosen

    def close(self) -> None:
        """Drop what was begun."""
        self._work = None


def _block(notes: Sequence[Note]) -> str:
    return OPENING + "".join(note.text + "\n" for note in notes) + CLOSING


def _lines(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


def about(note: Note) -> str:
    """What a note is on, for people."""
    return f"notes on turns {note.first} to {note.last}"
