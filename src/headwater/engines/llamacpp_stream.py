"""Conversations over seats of llama.cpp: what leaves, and when what stays is re-indexed.

Knows the window rule, positions and gaps. Does not know the C interface, text or dialogue.

Tokens leave exactly when the window says, so what is held is the same as on every engine; that frees cells and moves
nothing. What moves keys is re-indexing, which turns the whole window in place: done for every token it wears
low-precision keys out. So the gap that evictions leave between pins and window may grow before it is closed
(`reindex_step`), and it is closed right before the next decode, which is when llama.cpp turns the keys: nothing can be
saved between the two.
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headwater.engines.base import Evicted, Stream
from headwater.engines.llamacpp_cells import PIECE, QUANTISED, SCORED_PIECE, Pool, Seat
from headwater.engines.llamacpp_model import Model
from headwater.engines.snapshot import Content, Part, Snapshot
from headwater.errors import BudgetError, CacheStateError, ContextFull, SnapshotError, UnsupportedModel, UsageError
from headwater.policies.window import Window

REINDEX_TOKENS = 64
"""The gap that is closed at once, where a sixteenth of the window is less."""

MOST_TURNS = 64
"""How often a key may be turned in its life: a window's length in gaps that are closed at once."""

LEAST_QUANTISED = 32
"""The smallest gap that is closed where keys are quantised: less at a time destroys them."""

FIRST_CELLS = 512
"""What a stream that never evicts begins with; it doubles when it is full."""


def reindex_step(window: Window, *, context_length: int, rotary: bool, quantised: bool, name: str) -> int:
    """How many positions may be missing between pins and window before the gap is closed.

    With pins, the distance from a pin to the newest token stays within the trained length. Raises BudgetError where
    that leaves so little at a time that keys are worn out.
    """
    room = context_length - window.budget - 1
    if not rotary:  # positions are learned and none may be passed; closing a gap turns nothing
        return room + 1
    if window.pins == 0:  # no distance crosses the gap, it only counts positions
        return max(REINDEX_TOKENS, room)
    step = max(1, min(max(REINDEX_TOKENS, window.recent // 16), room))
    least = max(-(-window.recent // MOST_TURNS), LEAST_QUANTISED if quantised else 1)
    if max(step, window.block) < least:
        raise BudgetError(
            f"a budget of {window.budget} of {name}'s {context_length} positions leaves {room} for the gap that "
            f"evictions open after the pins; closing it by less than {least} at a time would wear the keys out: lower "
            f"the budget to {context_length - least - 1}, or let blocks of {least} tokens leave at a time"
        )
    return step


class LlamaCppStream(Stream):
    """What both kinds share. `fingerprint` is the engine's."""

    def __init__(self, model: Model, pool: Pool, cells: int, *, fingerprint: str, reindex: bool) -> None:
        self._model, self._pool, self._fingerprint, self._reindex = model, pool, fingerprint, reindex
        self._seen = self._held = self._gap = self._evicted_at = 0
        self._logits: NDArray[np.float32] | None = None
        self._seat: Seat | None = None
        self._sit(pool.take(cells))

    def _sit(self, seat: Seat) -> None:
        self._seat = seat
        self._leave = weakref.finalize(self, self._pool.give, seat)
        self._leave.atexit = False

    @property
    def seen(self) -> int:
        return self._seen

    @property
    def held(self) -> int:
        return self._held

    @property
    def kept(self) -> NDArray[np.int64]:
        pins = min(self._pins, self._held)
        recent = np.arange(self._seen - (self._held - pins), self._seen, dtype=np.int64)
        return np.concatenate([np.arange(pins, dtype=np.int64), recent])

    @property
    def nbytes(self) -> int:
        return 0 if self._seat is None else self._pool.nbytes(self._seat)

    def feed(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        left = self._checked(tokens)
        logits = np.empty(0, dtype=np.float32)
        while left:
            piece, left = self._next(left, PIECE)
            logits = self._step(piece)[-1]
        self._logits = logits
        return logits.copy()

    def score(self, tokens: Sequence[int]) -> NDArray[np.float64]:
        left = self._checked(tokens)
        if self._logits is None:
            raise UsageError("nothing predicts the first of these tokens; feed at least one token before scoring")
        scores: list[NDArray[np.float64]] = []
        before = self._logits
        while left:
            piece, left = self._next(left, SCORED_PIECE)
            after = self._step(piece, every=True)
            scores.append(_log_probabilities(np.concatenate([before[None], after[:-1]]), piece))
            self._logits = before = after[-1].copy()
        return np.concatenate(scores)

    def _next(self, left: list[int], most: int) -> tuple[list[int], list[int]]:
        count = min(self._piece(len(left)), most)
        return left[:count], left[count:]

    def _step(self, piece: list[int], *, every: bool = False) -> NDArray[np.float32]:
        """One decode, before which a gap is closed and after which what is over the budget leaves."""
        self._logits = None
        self._make_ready(len(piece))
        logits = self._open().decode(piece, self._held + self._gap, every=every)
        self._seen += len(piece)
        self._held += len(piece)
        self._settle()
        return logits

    def rollback(self, count: int) -> None:
        seat = self._open()
        if not 0 <= count <= self._seen:
            raise UsageError(f"cannot roll back {count} tokens: {self._seen} were fed")
        if count and self._seen - count < self._evicted_at:
            raise CacheStateError(
                f"cannot roll back {count} tokens: tokens evicted when {self._evicted_at} had been fed would be needed "
                f"again; at most {self._seen - self._evicted_at} can be taken back"
            )
        if not count:
            return
        end = self._held + self._gap
        seat.remove(end - count, -1)
        self._seen, self._held, self._logits = self._seen - count, self._held - count, None

    def snapshot(self) -> Snapshot:
        seat = self._open()
        parts = {"cells": Part(dtype="U8", array=seat.state())}
        if self._logits is not None:
            parts["logits"] = Part(dtype="F32", array=self._logits.copy())
        return Snapshot(
            fingerprint=self._fingerprint,
            window=self.window,
            reindex=self._reindex,
            state={
                "library": self._model.library.version,
                "room": seat.cells,
                "seen": self._seen,
                "held": self._held,
                "gap": self._gap,
                "evicted_at": self._evicted_at,
            },
            parts=parts,
        )

    def load(self, content: Content) -> NDArray[np.float32] | None:
        """Become the stream that was saved; the logits after its last token. Raises SnapshotError when that does not
        fit."""
        state = content.state
        if state["library"] != self._model.library.version:
            raise SnapshotError(
                f"{content.path} was written by llama.cpp {state['library']}, and this is {self._model.library.version}"
            )
        self._check_limit(content)
        self._room(state["room"])
        seat = self._open()
        held, gap = int(state["held"]), int(state["gap"])
        if not seat.load(content.arrays["cells"]) or seat.last != (held + gap - 1 if held else -1):
            raise SnapshotError(f"{content.path} holds a state that llama.cpp does not take up: {self._said}")
        self._seen, self._held, self._gap = int(state["seen"]), held, gap
        self._evicted_at = int(state["evicted_at"])
        if self._model.swa_tokens:  # cells that the model looks at no more are not saved, and could be wanted again
            self._evicted_at = self._seen
        logits = content.arrays.get("logits")
        self._logits = None if logits is None else logits.copy()
        return None if logits is None else logits.copy()

    @property
    def _said(self) -> str:
        return self._model.library.log.reason()

    def close(self) -> None:
        if self._seat is not None:
            self._seat = None
            self._leave()
        self._logits = None

    def _open(self) -> Seat:
        if self._seat is None:
            raise CacheStateError("this stream is closed; open a new one")
        return self._seat

    def _checked(self, tokens: Sequence[int]) -> list[int]:
        self._open()
        ids = [int(token) for token in tokens]
        if not ids:
            raise UsageError("no tokens to feed; give at least one")
        for token in ids:
            if not 0 <= token < self._model.vocab_size:
                raise UsageError(f"unknown token id {token}; ids run from 0 to {self._model.vocab_size - 1}")
        return ids

    @property
    def _pins(self) -> int:
        return 0 if self.window is None else self.window.pins

    @abstractmethod
    def _piece(self, count: int) -> int:
        """How many of the next `count` tokens go in one decode."""

    @abstractmethod
    def _make_ready(self, count: int) -> None:
        """Make it possible to decode `count` tokens."""

    @abstractmethod
    def _settle(self) -> None:
        """The end of a step."""

    def _room(self, cells: int) -> None:
        """Make sure that there are as many cells as a saved stream had."""

    def _check_limit(self, content: Content) -> None:
        """Whether a saved stream is within the limit."""


class WindowStream(LlamaCppStream):
    """A conversation in a fixed budget."""

    def __init__(self, model: Model, pool: Pool, window: Window, *, fingerprint: str, reindex: bool) -> None:
        self.window = self._rule = window
        self._close_at = reindex_step(
            window,
            context_length=model.context_length,
            rotary=model.rotary,
            quantised=pool.settings.type_k in QUANTISED,
            name=model.name,
        )
        super().__init__(model, pool, window.budget + 1, fingerprint=fingerprint, reindex=reindex)
        if not self._open().can_shift:
            self.close()
            raise UnsupportedModel(
                f"llama.cpp cannot move positions of {model.name} in a context of {window.budget + 1} tokens, so "
                "nothing can leave its cache here; take the policy full, or the transformers engine"
            )

    def evict(self, count: int) -> Evicted:
        seat = self._open()
        pins = min(self._rule.pins, self._held)
        loose = self._held - pins
        if not 0 <= count <= loose:
            raise UsageError(f"cannot evict {count} tokens: {loose} are held unpinned, and {pins} pinned")
        if not self._reindex and pins and count == loose:
            raise UsageError(
                f"cannot evict all {count} unpinned tokens without re-indexing; evict at most {count - 1}: llama.cpp "
                "knows where the window is by a token in it"
            )
        start = self._seen - loose
        if count:
            first = pins + self._gap
            seat.remove(first, first + count)
            self._held -= count
            self._gap += count
            self._evicted_at = self._seen
            if count == loose:
                self._gap = 0
        return Evicted(start=start, stop=start + count)

    def skip(self, positions: int) -> None:
        seat = self._open()
        if positions < 0:
            raise UsageError(f"cannot skip {positions} positions; give 0 or more")
        if self._held <= self._rule.pins:
            raise UsageError("cannot skip positions before the window holds a token; feed more first")
        if not self._reindex and positions:
            seat.shift(self._rule.pins + self._gap, positions)
            self._gap += positions
        self._seen += positions
        self._evicted_at = self._seen

    def _piece(self, count: int) -> int:
        return min(count, self._rule.budget + 1 - self._held)

    def _make_ready(self, count: int) -> None:
        if self._reindex and self._gap >= self._close_at:
            self._open().shift(min(self._rule.pins, self._held) + self._gap, -self._gap)
            self._gap = 0

    def _settle(self) -> None:
        if over := self._rule.excess(self._held):
            self.evict(over)


class GrowingStream(LlamaCppStream):
    """A conversation that keeps everything, up to a limit."""

    window = None

    def __init__(self, model: Model, pool: Pool, limit_tokens: int, *, fingerprint: str, reindex: bool) -> None:
        self.limit_tokens = limit_tokens
        super().__init__(model, pool, min(limit_tokens, FIRST_CELLS), fingerprint=fingerprint, reindex=reindex)

    def evict(self, count: int) -> Evicted:
        self._open()
        raise UsageError(f"cannot evict {count} tokens: this stream keeps everything")

    def _checked(self, tokens: Sequence[int]) -> list[int]:
        ids = super()._checked(tokens)
        if self._seen + len(ids) > self.limit_tokens:
            raise ContextFull(
                f"{self._seen} tokens are held, {len(ids)} more do not fit the limit of {self.limit_tokens}; "
                f"start over, or choose a policy that evicts"
            )
        return ids

    def _check_limit(self, content: Content) -> None:
        held = content.state["held"]
        if held > self.limit_tokens:
            raise SnapshotError(
                f"{content.path} holds {held} tokens, which do not fit the limit of {self.limit_tokens}"
            )

    def _piece(self, count: int) -> int:
        return count

    def _make_ready(self, count: int) -> None:
        need, cells = self._held + count, self._open().cells
        if need > cells:
            self._room(min(self.limit_tokens, max(need, 2 * cells)))

    def _room(self, cells: int) -> None:
        """Move to a seat of so many cells."""
        before = self._open()
        if before.cells >= cells:
            return
        state = before.state() if self._held else None
        leave = self._leave
        self._sit(self._pool.take(cells))
        if state is not None and not self._open().load(state):
            raise CacheStateError(f"llama.cpp did not take its own state into a larger context: {self._said}")
        leave()

    def _settle(self) -> None:
        pass


def _log_probabilities(logits: NDArray[np.float32], chosen: Sequence[int]) -> NDArray[np.float64]:
    """The natural log of the probability of one id in each row, `[tokens]`."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    return wide[np.arange(len(chosen)), list(chosen)] - np.log(np.exp(wide).sum(axis=1))
