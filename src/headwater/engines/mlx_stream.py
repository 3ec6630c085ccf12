"""Conversations over the cells of a model of mlx-lm: what leaves, and where what stays is put.

Knows the window rule, slots and positions. Does not know how a layer stores its keys, text or dialogue.

A token's keys stay as they were written: where tokens leave, it is the pins that follow the window, turned once from
float32 copies by all that has left so far, so nothing wears out however long it goes on. Positions begin again (every
key of the window turned once) before they pass what the model was trained for, and no more than once in a window's
length.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from headwater.engines.base import Evicted, Stream
from headwater.engines.mlx_cells import Cells
from headwater.engines.snapshot import Content, Part, Snapshot
from headwater.errors import CacheStateError, ContextFull, SnapshotError, UsageError
from headwater.policies.window import Window

PIECE = 512
"""The most tokens in one forward pass."""

SCORED_PIECE = 64
"""The same where the logits of every token are wanted."""

FIRST_SLOTS = 256
"""What a stream that never evicts begins with; it doubles when it is full."""

_NUMPY = {
    mx.float32: ("F32", None),
    mx.float16: ("F16", None),
    mx.bfloat16: ("BF16", mx.uint16),
    mx.uint32: ("U32", None),
}
"""What a kind of numbers is called in a snapshot, and the integers that its bits are kept as, where NumPy has none."""


class Host(Protocol):
    """What a stream needs of its engine."""

    net: Any
    vocab_size: int
    context_length: int
    lock: threading.RLock
    closed: bool

    @property
    def fingerprint(self) -> str: ...

    def cells(self, slots: int) -> list[Cells]: ...


class MlxStream(Stream):
    """A conversation: in a fixed budget, or without a window up to a limit."""

    def __init__(self, host: Host, window: Window | None, *, limit_tokens: int, reindex: bool) -> None:
        self.window, self.limit_tokens = window, limit_tokens
        self._host, self._reindex = host, reindex
        self._slots = min(limit_tokens, FIRST_SLOTS) if window is None else window.budget + 1
        self._layers: list[Cells] = host.cells(self._slots)
        self._places = np.empty(0, dtype=np.int64)
        """The position in the stream of the token in each slot."""
        self._seen = self._moved = self._placed = self._evicted_at = 0
        self._logits: NDArray[np.float32] | None = None
        self._closed = False
        # How far positions may run ahead of what is held before they begin again.
        self._ahead = 0 if window is None else max(host.context_length - window.budget - 1, window.recent)

    @property
    def seen(self) -> int:
        return self._seen

    @property
    def held(self) -> int:
        return len(self._places)

    @property
    def kept(self) -> NDArray[np.int64]:
        return np.sort(self._places)

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self._layers)

    @property
    def _pins(self) -> int:
        return 0 if self.window is None else min(self.window.pins, self.held)

    # Feeding.

    def feed(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        left = self._checked(tokens)
        with self._host.lock:
            while len(left) > 1:
                count = min(self._piece(len(left) - 1), PIECE)
                self._step(left[:count], logits=False)
                left = left[count:]
            logits = self._step(left, logits=True)[0]
            self._logits = logits
        return logits.copy()

    def score(self, tokens: Sequence[int]) -> NDArray[np.float64]:
        left = self._checked(tokens)
        if self._logits is None:
            raise UsageError("nothing predicts the first of these tokens; feed at least one token before scoring")
        scores: list[NDArray[np.float64]] = []
        before = self._logits
        with self._host.lock:
            while left:
                count = min(self._piece(len(left)), SCORED_PIECE)
                piece, left = left[:count], left[count:]
                after = self._step(piece, logits=True)
                scores.append(_log_probabilities(np.concatenate([before[None], after[:-1]]), piece))
                self._logits = before = after[-1].copy()
        return np.concatenate(scores)

    def _piece(self, count: int) -> int:
        """How many of the next tokens go in one forward pass: an eviction comes after the step that crosses the
        budget."""
        return count if self.window is None else min(count, self.window.budget + 1 - self.held)

    def _step(self, piece: list[int], *, logits: bool) -> NDArray[np.float32]:
        """One forward pass, before which keys are put where they belong and after which what is over the budget leaves;
        the logits of every token, or none."""
        self._logits = None
        self._settle(len(piece))
        held, offset = self.held, self.held + self._moved
        try:
            out = self._host.net(mx.array([piece]), cache=self._layers)
            wanted = [out] if logits else []
            mx.eval(wanted, [layer.arrays for layer in self._layers])
        except BaseException:  # a pass that was broken off leaves some layers with tokens that others lack
            for layer in self._layers:
                layer.rewind(held, offset)
            raise
        self._places = np.concatenate([self._places, np.arange(self._seen, self._seen + len(piece), dtype=np.int64)])
        self._seen += len(piece)
        if self.window is not None and (over := self.window.excess(self.held)):
            self.evict(over)
        return np.array(out[0].astype(mx.float32)) if logits else np.empty((0, 0), dtype=np.float32)

    def _settle(self, count: int) -> None:
        """Put everything where the next `count` tokens shall find it."""
        if self._reindex and self._moved > self._ahead:
            self._begin_at(0)
        if self._reindex and self._placed != self._moved and self._pins:
            for layer in self._layers:
                layer.place_pins(self._pins, self._moved)
        self._placed = self._moved
        if self.window is None and self.held + count > self._slots:
            self._slots = min(self.limit_tokens, max(self.held + count, 2 * self._slots))
            for layer in self._layers:
                layer.grow(self._slots)
        for layer in self._layers:
            layer.rewind(self.held, self.held + self._moved)

    def _begin_at(self, moved: int) -> None:
        """Turn the window's keys, once, so that positions run ahead of what is held by `moved`."""
        for layer in self._layers:
            layer.turn(self._pins, moved - self._moved)
        self._moved = moved

    # Leaving.

    def evict(self, count: int) -> Evicted:
        self._open()
        if self.window is None:
            raise UsageError(f"cannot evict {count} tokens: this stream keeps everything")
        pins, loose = self._pins, self.held - self._pins
        if not 0 <= count <= loose:
            raise UsageError(f"cannot evict {count} tokens: {loose} are held unpinned, and {pins} pinned")
        start = self._seen - loose
        if count:
            left = self.held - count
            going = self._places < start + count
            going[:pins] = False
            targets = np.flatnonzero(going[:left])
            sources = left + np.flatnonzero(~going[left:])
            with self._host.lock:
                for layer in self._layers:
                    layer.move(sources.tolist(), targets.tolist(), left)
            self._places[targets] = self._places[sources]
            self._places = self._places[:left].copy()
            self._moved += count
            self._evicted_at = self._seen
        return Evicted(start=start, stop=start + count)

    def rollback(self, count: int) -> None:
        self._open()
        if not 0 <= count <= self._seen:
            raise UsageError(f"cannot roll back {count} tokens: {self._seen} were fed")
        if count and self._seen - count < self._evicted_at:
            raise CacheStateError(
                f"cannot roll back {count} tokens: tokens evicted when {self._evicted_at} had been fed would be needed "
                f"again; at most {self._seen - self._evicted_at} can be taken back"
            )
        if count:
            self._places = self._places[: self.held - count].copy()
            self._seen, self._logits = self._seen - count, None

    def skip(self, positions: int) -> None:
        self._open()
        if positions < 0:
            raise UsageError(f"cannot skip {positions} positions; give 0 or more")
        if self.window is None or self.held <= self.window.pins:
            raise UsageError("cannot skip positions before the window holds a token; feed more first")
        with self._host.lock:
            far = self._moved + positions
            self._begin_at(far % (self._ahead + 1) if self._reindex else far)
        self._places[self._pins :] += positions
        self._seen += positions
        self._evicted_at = self._seen

    # Saving.

    def snapshot(self) -> Snapshot:
        self._open()
        with self._host.lock:
            self._settle(0)
            parts = {name: _part(array) for name, array in self._tensors().items()}
        if self._logits is not None:
            parts["logits"] = Part(dtype="F32", array=self._logits.copy())
        parts["places"] = Part(dtype="I64", array=self._places.copy())
        return Snapshot(
            fingerprint=self._host.fingerprint,
            window=self.window,
            reindex=self._reindex,
            state={"seen": self._seen, "moved": self._moved, "evicted_at": self._evicted_at, "slots": self._slots},
            parts=parts,
        )

    def _tensors(self) -> dict[str, mx.array]:
        """What is held, by layer."""
        found: dict[str, mx.array] = {}
        for index, layer in enumerate(self._layers):
            for kind, parts in (("keys", layer.keys), ("values", layer.values)):
                for number, part in enumerate(parts):
                    found[f"{index}.{kind}.{number}"] = part[..., : self.held, :]
            if layer.pristine is not None:
                found[f"{index}.pristine"] = layer.pristine
        return found

    def load(self, content: Content) -> NDArray[np.float32] | None:
        """Become the stream that was saved; the logits after its last token. Raises SnapshotError when that does not
        fit."""
        state, places = content.state, content.arrays["places"]
        if self.window is None and len(places) > self.limit_tokens:
            raise SnapshotError(
                f"{content.path} holds {len(places)} tokens, which do not fit the limit of {self.limit_tokens}"
            )
        with self._host.lock:
            self._places = places.copy()
            self._seen, self._evicted_at = int(state["seen"]), int(state["evicted_at"])
            self._moved = self._placed = int(state["moved"])
            if self.window is None and state["slots"] > self._slots:
                self._slots = min(self.limit_tokens, int(state["slots"]))
                for layer in self._layers:
                    layer.grow(self._slots)
            for index, layer in enumerate(self._layers):
                for kind, parts in (("keys", layer.keys), ("values", layer.values)):
                    for number, part in enumerate(parts):
                        part[..., : self.held, :] = _array(content, f"{index}.{kind}.{number}")
                if f"{index}.pristine" in content.arrays:
                    layer.pristine = _array(content, f"{index}.pristine")
            mx.eval([layer.arrays for layer in self._layers])
        logits = content.arrays.get("logits")
        self._logits = None if logits is None else logits.copy()
        return None if logits is None else logits.copy()

    def close(self) -> None:
        self._closed = True
        self._layers, self._logits = [], None

    def _open(self) -> None:
        if self._closed:
            raise CacheStateError("this stream is closed; open a new one")
        if self._host.closed:
            raise CacheStateError("the engine is closed; open a new one")

    def _checked(self, tokens: Sequence[int]) -> list[int]:
        self._open()
        ids = [int(token) for token in tokens]
        if not ids:
            raise UsageError("no tokens to feed; give at least one")
        for token in ids:
            if not 0 <= token < self._host.vocab_size:
                raise UsageError(f"unknown token id {token}; ids run from 0 to {self._host.vocab_size - 1}")
        if self.window is None and self._seen + len(ids) > self.limit_tokens:
            raise ContextFull(
                f"{self._seen} tokens are held, {len(ids)} more do not fit the limit of {self.limit_tokens}; "
                f"start over, or choose a policy that evicts"
            )
        return ids


def _log_probabilities(logits: NDArray[np.float32], chosen: Sequence[int]) -> NDArray[np.float64]:
    """The natural log of the probability of one id in each row, `[tokens]`."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    return wide[np.arange(len(chosen)), list(chosen)] - np.log(np.exp(wide).sum(axis=1))


def _part(array: mx.array) -> Part:
    """A copy in memory of its own."""
    name, bits = _NUMPY[array.dtype]
    return Part(dtype=name, array=np.array(array if bits is None else array.view(bits)))


def _array(content: Content, name: str) -> mx.array:
    array = mx.array(content.arrays[name])
    return array.view(mx.bfloat16) if content.dtypes[name] == "BF16" else array
