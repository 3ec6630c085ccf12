"""A model made of arithmetic: public, deterministic, instant, for users' tests as well as our own.

Knows bytes, ChatML and the window rule; what its attention looks like is in `fake_attention`. Does not know any
language: its logits are a hash of exactly what the stream holds (which positions, which ids), bent so that answers look
like short words and end by themselves. A held set that is wrong by a single token changes every logit, so a test on
this engine sees mistakes that a real model would blur.
"""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headwater.engines.base import AttentionBlock, Engine, Evicted, ModelFacts, Restored, Stream
from headwater.engines.fake_attention import HEADS, LAYERS, paid
from headwater.engines.request import AttentionRequest, WeightType
from headwater.engines.snapshot import Content, Held, Part, Snapshot, read_snapshot
from headwater.errors import (
    BudgetError,
    CacheStateError,
    ContextFull,
    SnapshotError,
    UnsupportedCall,
    UnsupportedModel,
    UsageError,
)
from headwater.policies import Policy
from headwater.policies.window import Window

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
FIRST_CONTROL = 256
VOCABULARY = FIRST_CONTROL + len(CONTROL_TOKENS)
END_OF_TEXT, TURN_START, TURN_END = range(FIRST_CONTROL, VOCABULARY)

_ROLES = ("system", "user", "assistant")
_OPENING = len("assistant\n")
_SHORTEST_ANSWER = 4
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_VOWELS, _CONSONANTS = frozenset(b"aeiou"), frozenset(b"bcdfghklmnprstvwz")
_IDS = np.arange(VOCABULARY, dtype=np.uint64) * np.uint64(_GOLDEN)


def _mix(value: int) -> int:
    """Splitmix64: every bit of the result depends on every bit of `value`."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _noise(digest: int) -> NDArray[np.float32]:
    """One number in [0, 4) for every id, from the digest."""
    value = _IDS + np.uint64(digest)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((value >> np.uint64(40)).astype(np.float32)) / np.float32(1 << 22)


def _boost(ids: Iterable[int]) -> NDArray[np.float32]:
    out = np.zeros(VOCABULARY, dtype=np.float32)
    out[list(ids)] = 12.0
    return out


_WANT = {"vowel": _boost(_VOWELS), "consonant": _boost(_CONSONANTS), "space": _boost(b" "), "end": _boost([TURN_END])}


class FakeEngine(Engine):
    """A byte-level model with a ChatML template.

    `answer_tokens` is about how long its answers are; None makes them endless. `default_system` is a system prompt that
    the template puts in when a conversation has none, as some models' templates do. `supplies` is what it claims to
    supply to policies.
    """

    def __init__(
        self,
        *,
        name: str = "fake",
        context_length: int = 8192,
        answer_tokens: int | None = 24,
        default_system: str | None = None,
        supplies: frozenset[str] = frozenset(),
    ) -> None:
        if context_length < 1:
            raise UsageError(f"context_length must be at least 1, got {context_length}")
        if answer_tokens is not None and answer_tokens < 1:
            raise UsageError(f"answer_tokens must be at least 1, or None for endless answers, got {answer_tokens}")
        self.name = name
        self.context_length = context_length
        self.stop_tokens = frozenset({END_OF_TEXT, TURN_END})
        self.supplies = supplies
        self.answer_tokens = answer_tokens
        self.default_system = default_system

    @classmethod
    def load(cls, model: str, **options: object) -> FakeEngine:
        """The engine under the name `model`; any name will do, because no weights are read."""
        known = ("context_length", "answer_tokens", "default_system", "supplies")
        for given in options:
            if given not in known:
                raise UsageError(f"the fake engine has no option {given!r}; known: {', '.join(known)}")
        return cls(name=model, **options)  # pyright: ignore[reportArgumentType]

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        parts = re.split(f"({'|'.join(map(re.escape, CONTROL_TOKENS))})", text) if special else [text]
        out: list[int] = []
        for part in parts:
            if special and part in CONTROL_TOKENS:
                out.append(FIRST_CONTROL + CONTROL_TOKENS.index(part))
                continue
            try:
                out.extend(part.encode())
            except UnicodeEncodeError as error:
                raise UsageError(f"text is not valid Unicode at character {error.start}: {error.reason}") from error
        return out

    def decode(self, tokens: Iterable[int]) -> str:
        return bytes(token for token in tokens if token < FIRST_CONTROL).decode(errors="replace")

    def render(self, messages: Sequence[Mapping[str, str]], *, open_answer: bool) -> str:
        turns = [(message["role"], message["content"]) for message in messages]
        for role, _ in turns:
            if role not in _ROLES:
                raise UnsupportedModel(f"the template of {self.name} has no role {role!r}; known: {', '.join(_ROLES)}")
        if self.default_system is not None and (not turns or turns[0][0] != "system"):
            turns.insert(0, ("system", self.default_system))
        text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
        return text + ("<|im_start|>assistant\n" if open_answer else "")

    def open(self, window: Held, *, reindex: bool = True, limit_tokens: int | None = None) -> FakeStream:
        if isinstance(window, Policy):
            raise UnsupportedCall(
                f"{window.name} keeps a set of its own in every head, and {self.name} keeps windows only; these would "
                "work: sliding-window, streaming-llm"
            )
        if window is not None and limit_tokens is not None:
            raise UsageError("limit_tokens is for a stream without a window; one with a window never ends")
        if window is not None and window.budget >= self.context_length:
            raise BudgetError(
                f"a budget of {window.budget} tokens needs {window.budget + 1} positions, and {self.name} has "
                f"{self.context_length}; lower the budget to {self.context_length - 1}"
            )
        limit = limit_tokens if limit_tokens is not None else self.context_length
        if not 1 <= limit <= self.context_length:
            raise BudgetError(f"limit_tokens must be 1 to the trained length of {self.context_length}, got {limit}")
        return FakeStream(self, window, reindex=reindex, limit_tokens=limit)

    @property
    def fingerprint(self) -> str:
        settings = json.dumps([self.name, self.context_length, self.answer_tokens, self.default_system])
        return hashlib.sha256(settings.encode()).hexdigest()

    def restore(
        self,
        path: Path | str,
        window: Held,
        *,
        reindex: bool = True,
        limit_tokens: int | None = None,
        digest: str | None = None,
    ) -> Restored:
        content = read_snapshot(path, fingerprint=self.fingerprint, window=window, reindex=reindex, digest=digest)
        stream = self.open(window, reindex=reindex, limit_tokens=limit_tokens)
        stream.load(content)
        return Restored(stream=stream, logits=stream.logits, notes=content.notes)

    def facts(self) -> ModelFacts:
        tokens = "bytes, " + ", ".join(CONTROL_TOKENS)
        return ModelFacts(
            architecture="FakeEngine",
            precision="integer",
            tokenizer_sha256=hashlib.sha256(tokens.encode()).hexdigest(),
            rotary={},
        )

    def attention_layers(self) -> tuple[int, ...]:
        return tuple(range(LAYERS))

    def attention_heads(self) -> tuple[int, int]:
        return LAYERS, HEADS

    def attention(
        self,
        tokens: Sequence[int],
        *,
        layers: Sequence[int] | None = None,
        heads: Sequence[int] | None = None,
        start: int = 0,
        block: int = 64,
        dtype: WeightType = np.float32,
    ) -> Iterator[AttentionBlock]:
        request = AttentionRequest.checked(
            self, tokens, vocabulary=VOCABULARY, layers=layers, heads=heads, start=start, block=block, dtype=dtype
        )
        return (_block(request, block) for block in request.blocks())


def _block(request: AttentionRequest, block: range) -> AttentionBlock:
    ids = np.asarray(request.tokens, dtype=np.int64)
    weights = np.zeros((len(request.layers), len(request.heads), len(block), block.stop), dtype=request.dtype)
    for index, now in enumerate(block):
        weights[:, :, index, : now + 1] = paid(ids, now, request.layers, request.heads)
    return AttentionBlock(first=block.start, weights=weights)


_SAVED = ("_fed", "_skipped", "_evicted_at", "_sum", "_since_control")
"""The numbers of a stream, beside its ids and its prediction."""


class FakeStream(Stream):
    """One conversation with the fake model: the ids it holds, in order, and a running hash of them."""

    def __init__(self, engine: FakeEngine, window: Window | None, *, reindex: bool, limit_tokens: int) -> None:
        self.window = window
        self._engine, self._reindex, self._limit = engine, reindex, limit_tokens
        self._ids = array("q")
        self._fed = self._skipped = self._evicted_at = 0
        self._sum = 0
        self._since_control = 0
        self._logits: NDArray[np.float32] | None = None
        self._closed = False

    @property
    def seen(self) -> int:
        return self._fed + self._skipped

    @property
    def kept(self) -> NDArray[np.int64]:
        pins = min(self._pins, len(self._ids))
        window = np.arange(self.seen - (len(self._ids) - pins), self.seen, dtype=np.int64)
        return np.concatenate([np.arange(pins, dtype=np.int64), window])

    @property
    def tokens(self) -> list[int]:
        """Ids held, in the order of `kept`."""
        return self._ids.tolist()

    @property
    def nbytes(self) -> int:
        return len(self._ids) * self._ids.itemsize

    def feed(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        ids = self._checked(tokens)
        for token in ids[:-1]:
            self._push(token)
            self._settle()
        return self._step(ids[-1]).copy()

    def score(self, tokens: Sequence[int]) -> NDArray[np.float64]:
        ids = self._checked(tokens)
        out = np.empty(len(ids), dtype=np.float64)
        for index, token in enumerate(ids):
            if self._logits is None:
                raise UsageError("there is no prediction to score against: feed at least one token first")
            logits = self._logits.astype(np.float64)
            top = logits.max()
            out[index] = logits[token] - top - np.log(np.exp(logits - top).sum())
            self._step(token)
        return out

    def evict(self, count: int) -> Evicted:
        self._check_open()
        if self.window is None:
            raise UsageError("a stream without a window never evicts; open it with a window")
        pins = min(self._pins, len(self._ids))
        evictable = len(self._ids) - pins
        if not 0 <= count <= evictable:
            raise UsageError(f"cannot evict {count} tokens: {evictable} are held unpinned, and {pins} pinned")
        start = self.seen - evictable
        if count:
            rank = self._fed - evictable
            for offset, token in enumerate(self._ids[pins : pins + count]):
                self._sum -= _mix((rank + offset) * VOCABULARY + token)
            del self._ids[pins : pins + count]
            self._evicted_at = self.seen
        return Evicted(start=start, stop=start + count)

    def rollback(self, count: int) -> None:
        self._check_open()
        if not 0 <= count <= self.seen:
            raise UsageError(f"cannot roll back {count} tokens: {self.seen} were fed")
        if count and self.seen - count < self._evicted_at:
            raise CacheStateError(
                f"cannot roll back {count} tokens: tokens evicted when {self._evicted_at} had been fed would be needed "
                f"again; at most {self.seen - self._evicted_at} can be taken back"
            )
        for _ in range(count):
            self._fed -= 1
            self._sum -= _mix(self._fed * VOCABULARY + self._ids.pop())
        self._since_control = next((i for i, token in enumerate(reversed(self._ids)) if token >= FIRST_CONTROL), 0)
        self._logits = None if count else self._logits

    def skip(self, positions: int) -> None:
        self._check_open()
        if positions < 0:
            raise UsageError(f"cannot skip {positions} positions; give 0 or more")
        if self.window is None or len(self._ids) <= self._pins:
            raise UsageError("cannot skip positions before the window holds a token; feed more first")
        self._skipped += positions
        self._evicted_at = self.seen

    @property
    def logits(self) -> NDArray[np.float32] | None:
        """What was predicted after the last token, if anything was."""
        return None if self._logits is None else self._logits.copy()

    def snapshot(self) -> Snapshot:
        self._check_open()
        parts = {"ids": Part(dtype="I64", array=np.array(self._ids, dtype=np.int64))}
        if self._logits is not None:
            parts["logits"] = Part(dtype="F32", array=self._logits.copy())
        return Snapshot(
            fingerprint=self._engine.fingerprint,
            window=self.window,
            reindex=self._reindex,
            state={name: getattr(self, name) for name in _SAVED},
            parts=parts,
        )

    def load(self, content: Content) -> None:
        """Become the stream that was saved. Raises SnapshotError when it does not fit the limit."""
        if self.window is None and len(content.arrays["ids"]) > self._limit:
            raise SnapshotError(
                f"{content.path} holds {len(content.arrays['ids'])} tokens, which do not fit the limit of {self._limit}"
            )
        for name in _SAVED:
            setattr(self, name, content.state[name])
        self._ids = array("q", content.arrays["ids"].tobytes())
        self._logits = content.arrays["logits"].copy() if "logits" in content.arrays else None

    def close(self) -> None:
        self._closed = True
        self._ids = array("q")
        self._logits = None

    @property
    def _pins(self) -> int:
        return self.window.pins if self.window is not None else 0

    def _check_open(self) -> None:
        if self._closed:
            raise CacheStateError("this stream is closed; open a new one")

    def _checked(self, tokens: Sequence[int]) -> list[int]:
        self._check_open()
        ids = [int(token) for token in tokens]
        if not ids:
            raise UsageError("feed at least one token, got none")
        for token in ids:
            if not 0 <= token < VOCABULARY:
                raise UsageError(f"unknown token id {token}; ids are 0 to {VOCABULARY - 1}")
        if self.window is None and self.seen + len(ids) > self._limit:
            raise ContextFull(
                f"{len(ids)} more tokens do not fit: {self.seen} of {self._limit} are used and nothing is ever evicted "
                "here; open the stream with a window"
            )
        return ids

    def _step(self, token: int) -> NDArray[np.float32]:
        self._push(token)
        self._logits = self._predict()
        self._settle()
        return self._logits

    def _push(self, token: int) -> None:
        self._sum += _mix(self._fed * VOCABULARY + token)
        self._ids.append(token)
        self._fed += 1
        self._since_control = 0 if token >= FIRST_CONTROL else self._since_control + 1

    def _settle(self) -> None:
        """The end of a step: what is over the budget leaves."""
        if self.window is not None and (over := self.window.excess(len(self._ids))):
            self.evict(over)

    def _predict(self) -> NDArray[np.float32]:
        """Logits from everything held; without re-indexing, from the gap between pins and window as well."""
        gap = 0 if self._reindex or not self._pins else self.seen - len(self._ids)
        digest = _mix(self._sum & _MASK) if not gap else _mix((self._sum + _mix(gap)) & _MASK)
        return _noise(digest) + _WANT[self._wish(digest)]

    def _wish(self, digest: int) -> str:
        """What comes next: letters in turn, a space when the word is long enough, the end when the answer is."""
        answer = min(self._since_control, len(self._ids)) - _OPENING
        usual = self._engine.answer_tokens
        if usual is not None and answer >= _SHORTEST_ANSWER and (digest % usual == 0 or answer >= 4 * usual):
            return "end"
        letters = 0
        for token in reversed(self._ids[-6:]):
            if token not in _VOWELS and token not in _CONSONANTS:
                break
            letters += 1
        if letters >= 6 or (letters >= 2 and (digest >> 32) % 3 == 0):
            return "space"
        return "consonant" if letters == 0 or self._ids[-1] in _VOWELS else "vowel"
