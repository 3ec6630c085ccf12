"""The seam between a conversation and a runtime: an engine is a model, a stream is one conversation inside it.

Knows tokens, positions and logits. Does not know any runtime, policy name, dialogue rule or sampling. One contract
suite (`tests/contract/test_engines.py`) runs over every engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray

from headwater.engines.snapshot import Held, SavedSnapshot, Snapshot
from headwater.errors import UnsupportedCall, UsageError
from headwater.policies.window import Window


@dataclass(frozen=True, slots=True, kw_only=True)
class Evicted:
    """Positions `[start, stop)` of the stream that left the cache for good, in one eviction."""

    start: int
    stop: int

    @property
    def count(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBlock:
    """What consecutive tokens paid: `weights[layer, head, i, p]` is the weight of position `p` for token `first + i`.

    Layers and heads are those asked for, in the order asked. Positions end with the block's newest token. A token's
    weights cover `0..first + i`, itself included; what lies beyond is 0. The array is the caller's own.
    """

    first: int
    weights: Float[np.ndarray, "layers heads tokens positions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What tells a model from another of the same name. `rotary` is what its configuration says of its positions."""

    architecture: str
    precision: str
    tokenizer_sha256: str
    rotary: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A stream as it was when its snapshot was made. `logits` are those after its last token, `[vocab]`; None where
    nothing was fed or the last tokens were taken back. `notes` are the caller's own."""

    stream: Stream
    logits: NDArray[np.float32] | None
    notes: Mapping[str, str]


class Stream(ABC):
    """One conversation inside an engine: what was fed, what is held.

    Positions count tokens of the whole stream from 0 and are never renumbered. A stream with a `window` evicts by
    itself, after the step that crosses the budget, and splits what it is fed so that neither the held set nor the
    logits depend on how the caller cuts the text. A stream without a window (`None`) never evicts and raises
    ContextFull at its limit, unless it was opened under a policy that picks tokens in every head: then `held` is what a
    head holds, `kept` what any of them does, and nothing can be evicted or taken back from outside.
    """

    window: Window | None

    @property
    @abstractmethod
    def seen(self) -> int:
        """Tokens ever fed."""

    @property
    @abstractmethod
    def kept(self) -> NDArray[np.int64]:
        """Positions held, ascending, `[held]`."""

    @property
    def held(self) -> int:
        """Tokens whose K and V are in the cache now."""
        return len(self.kept)

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Physical bytes of the cache now."""

    @abstractmethod
    def feed(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Feed at least one token; return the logits after the last one, `[vocab]`.

        Raises ContextFull (no window and no room) with nothing fed, UsageError for an empty list or an unknown token
        id.
        """

    @abstractmethod
    def score(self, tokens: Sequence[int]) -> NDArray[np.float64]:
        """Feed the tokens and return the natural-log probability each had just before it was fed, `[len(tokens)]`.

        Every probability is given what the cache held at that step. Raises UsageError when nothing was fed before:
        the first token of a stream has no prediction.
        """

    @abstractmethod
    def evict(self, count: int) -> Evicted:
        """Drop the `count` oldest unpinned tokens now. Raises UsageError when fewer are held, or without a window."""

    @abstractmethod
    def rollback(self, count: int) -> None:
        """Take back the newest `count` tokens, exactly. Raises CacheStateError when they caused an eviction.

        The prediction for the next token is gone with them: feed at least one token before `score`.
        """

    def oldest(self, pins: int) -> int:
        """The oldest position held beside the first `pins`; `seen` where none is."""
        rest = self.kept[self.kept >= pins]
        return int(rest[0]) if len(rest) else self.seen

    def skip(self, positions: int) -> None:
        """Move the stream's positions on, as if that many tokens had passed through the window; an experiment's tool.

        Raises UnsupportedCall where the runtime cannot.
        """
        raise UnsupportedCall(f"this engine's streams cannot skip {positions} positions; use the transformers engine")

    def snapshot(self) -> Snapshot:
        """Copy what the next step would use, for `Snapshot.write`; the stream may go on meanwhile.

        Raises UnsupportedCall where the runtime cannot, CacheStateError on a closed stream.
        """
        raise UnsupportedCall("this engine's streams cannot be saved")

    def save(self, path: Path | str, notes: Mapping[str, str] | None = None) -> SavedSnapshot:
        """Copy and write at once; raises as both do."""
        return self.snapshot().write(path, notes)

    @abstractmethod
    def close(self) -> None:
        """Give the memory back. Any later call raises CacheStateError; closing twice is allowed."""


class Engine(ABC):
    """A loaded model that can hold conversations."""

    name: str
    """What the user called it, e.g. `smollm2`."""

    context_length: int
    """The trained length, in tokens."""

    stop_tokens: frozenset[int]
    """Ids that end an answer."""

    supplies: frozenset[str]
    """What a policy that runs live may ask of its streams, e.g. `attention`; empty when they only evict by position.
    `attention()` below is not part of it: it watches a run of its own, and no stream."""

    choices: tuple[str, ...] = ()
    """What was chosen for the user when it was loaded, as lines for the header of a run."""

    @abstractmethod
    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Token ids of `text`, nothing added. Control tokens in it are parsed only when `special` is set, so that a
        user's text can never open or close a turn."""

    @abstractmethod
    def decode(self, tokens: Iterable[int]) -> str:
        """Text of the ids; control tokens are left out. Broken UTF-8 comes out as U+FFFD."""

    @abstractmethod
    def render(self, messages: Sequence[Mapping[str, str]], *, open_answer: bool) -> str:
        """The model's chat template over `{"role": ..., "content": ...}`; `open_answer` adds what opens an answer.

        Raises UnsupportedModel when the model has no chat template, saying how to give one, or refuses the roles.
        """

    @abstractmethod
    def open(self, window: Held, *, reindex: bool = True, limit_tokens: int | None = None) -> Stream:
        """A new, empty conversation. Without a window it never evicts, up to `limit_tokens` (default: the trained
        length). Under a policy (`Policy.live`) every head keeps its own tokens. With `reindex` the pins stay right
        before the window in the model's positions, and what a policy keeps lies without gaps; without, everything stays
        where it was written. Raises BudgetError when it does not fit the model's positions."""

    @property
    def apart(self) -> str | None:
        """Why `feed_together` computes its streams one after another; None where their steps are computed together."""
        return "this engine computes one stream at a time"

    def feed_together(self, streams: Sequence[Stream], tokens: Sequence[int]) -> list[NDArray[np.float32] | Exception]:
        """Feed one token to each of several streams of this engine; for each what `feed` returns, or what it raises.

        Every stream is left as it would be had it been alone: the same is held, and the logits differ by no more than
        sums in another order do. What goes wrong in one is nothing to the others. An engine that can (`apart`) reads
        its weights once for all of them. Raises UsageError, with nothing fed, for a stream that is there twice.
        """
        check_distinct(streams)
        return [fed_one(stream, token) for stream, token in zip(streams, tokens, strict=True)]

    @property
    def fingerprint(self) -> str:
        """What tells this model, its weights and its precision from every other; a snapshot is good for one only."""
        raise UnsupportedCall(f"{self.name} runs on an engine whose streams cannot be saved")

    def restore(
        self,
        path: Path | str,
        window: Held,
        *,
        reindex: bool = True,
        limit_tokens: int | None = None,
        digest: str | None = None,
    ) -> Restored:
        """A stream as it was saved; what it is fed next gives what the saved one would have given.

        `window`, `reindex` and `limit_tokens` are those of `open`. Raises SnapshotError for a file that is missing, cut
        short, altered, of another model or window, or that does not fit the limit; what `open` raises.
        """
        raise UnsupportedCall(f"{self.name} runs on an engine whose streams cannot be saved")

    def facts(self) -> ModelFacts:
        """What a recording of its attention says of the model. Raises as `attention_layers` does."""
        raise UnsupportedCall(f"{self.name} runs on an engine that does not show its attention")

    def attention_layers(self) -> tuple[int, ...]:
        """The layers whose attention can be watched, ascending, in the model's own count from 0. Layers without softmax
        attention (linear, recurrent) are not among them. Raises UnsupportedCall for an engine that shows none."""
        raise UnsupportedCall(f"{self.name} runs on an engine that does not show its attention")

    def attention_heads(self) -> tuple[int, int]:
        """How many layers can be watched, and query heads in each. Raises as `attention_layers` does."""
        raise UnsupportedCall(f"{self.name} runs on an engine that does not show its attention")

    def attention(
        self,
        tokens: Sequence[int],
        *,
        layers: Sequence[int] | None = None,
        heads: Sequence[int] | None = None,
        start: int = 0,
        block: int = 64,
        dtype: type[np.float32] | type[np.float16] = np.float32,
    ) -> Iterator[AttentionBlock]:
        """Run the tokens through the model once and yield what each paid to all before it, from token `start` on.

        Every token sees all before it, as far as the model itself looks back; the weights do not depend on the block,
        up to the rounding of sums. `block` tokens at a time; layers and heads are all, or those named. Memory is one
        block, `layers * heads * block * len(tokens)` weights, and K and V of the tokens. What a model pays to a learned
        sink of its own, which is no position, is missing from the sum of a row.

        Raises at once, before anything runs: UnsupportedCall for an engine that does not show its attention,
        ContextFull for more tokens than the model was trained for, UsageError for no tokens, an unknown token id, a
        layer or head that there is not, or a `start` outside the tokens.
        """
        raise UnsupportedCall(f"{self.name} runs on an engine that does not show its attention")

    def close(self) -> None:
        """Give the model back. Streams of a closed engine must not be used."""


def check_distinct(streams: Sequence[Stream]) -> None:
    """Raises UsageError for streams of which one is there twice."""
    if len({id(stream) for stream in streams}) < len(streams):
        raise UsageError(f"{len(streams)} streams were given and some are the same; give each once")


def fed_one(stream: Stream, token: int) -> NDArray[np.float32] | Exception:
    """What feeding a token returns, or raises."""
    try:
        return stream.feed([token])
    except Exception as error:
        return error
