"""Conversations inside a torch model: over a window, over what a policy picks in every head, over everything.

Knows how to run a model forward with a cache, piece by piece, and to bring logits over as NumPy arrays. Does not know
eviction (the cache does it), tokenizers or templates.
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from headwater.cache.adapter import WindowCache
from headwater.cache.host import HostMemory
from headwater.cache.hosted import Examined, base_model, load_stock, stock_bytes, stock_cache, stock_state
from headwater.cache.policy_cache import PolicyCache, attach
from headwater.cache.probe import read_rope
from headwater.cache.saved import State
from headwater.cache.together import Row
from headwater.engines.base import Evicted, Stream
from headwater.engines.snapshot import Content, Held, Snapshot
from headwater.engines.torch_parts import as_part, as_tensor
from headwater.errors import CacheStateError, ContextFull, SnapshotError, UsageError
from headwater.policies import Policy
from headwater.policies.window import Window

CHUNK = 512
"""The most tokens in one forward pass."""

SCORED_CHUNK = 128
"""The same where the logits of every token are wanted: a vocabulary of 50,000 costs 200 kB a token."""


class Host(Protocol):
    """What a stream needs of its engine."""

    model: Any
    vocab_size: int
    kv_dtype: str | None

    @property
    def fingerprint(self) -> str: ...

    def examined(self) -> Examined: ...


class TorchStream(Stream):
    """What both kinds share: forward passes, and the prediction that the last one left."""

    def __init__(self, engine: Host, cache: Any, *, reindex: bool = True) -> None:
        self._engine, self._reindex = engine, reindex
        self._cache: Any = cache
        self._next: torch.Tensor | None = None
        self._host = HostMemory()
        self._keeps: Held = None
        """What it keeps: None for everything."""

    @abstractmethod
    def _piece(self, count: int) -> int:
        """How many of the next `count` tokens go in one forward pass."""

    def _open(self) -> Any:
        if self._cache is None:
            raise CacheStateError("this stream is closed; open a new one")
        return self._cache

    def _checked(self, tokens: Sequence[int]) -> list[int]:
        self._open()
        checked = [int(token) for token in tokens]
        if not checked:
            raise UsageError("no tokens to feed; give at least one")
        unknown = [token for token in checked if not 0 <= token < self._engine.vocab_size]
        if unknown:
            raise UsageError(f"unknown token id {unknown[0]}; ids run from 0 to {self._engine.vocab_size - 1}")
        return checked

    def _forward(self, tokens: list[int], *, logits: int) -> torch.Tensor:
        """Logits of the last `logits` tokens (0: of all), `[tokens, vocab]`, float32."""
        model = self._engine.model
        ids = torch.tensor([tokens], device=model.device)
        return model(input_ids=ids, cache=self._cache, use_cache=True, logits_to_keep=logits).logits[0].float()

    @torch.inference_mode()
    def feed(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        left = self._checked(tokens)
        while left:
            count = min(self._piece(len(left)), CHUNK)
            self._next = self._forward(left[:count], logits=1)[-1].clone()
            left = left[count:]
        return self._prediction().cpu().numpy().copy()  # the caller's own

    @torch.inference_mode()
    def score(self, tokens: Sequence[int]) -> NDArray[np.float64]:
        left = self._checked(tokens)
        scores: list[NDArray[np.float64]] = []
        before = self._prediction()
        while left:
            count = min(self._piece(len(left)), SCORED_CHUNK)
            piece, left = left[:count], left[count:]
            after = self._forward(piece, logits=0)
            given = torch.cat((before[None], after[:-1])).log_softmax(-1)
            chosen = torch.tensor(piece, device=given.device)[:, None]
            scores.append(given.gather(1, chosen)[:, 0].double().cpu().numpy())
            self._next = before = after[-1].clone()
        return np.concatenate(scores)

    def row(self, token: int) -> Row | None:
        """What takes part in a step of several streams, to be fed a token; None where the next step is its own affair.
        Raises as `feed` does."""
        self._checked([token])
        return None

    def predicted(self, logits: torch.Tensor) -> NDArray[np.float32]:
        """A step of several streams left these for the next token; the caller's own copy of them."""
        self._next = logits
        return logits.cpu().numpy().copy()

    def _prediction(self) -> torch.Tensor:
        if self._next is None:
            raise UsageError("nothing predicts the first of these tokens; feed at least one token before scoring")
        return self._next

    def snapshot(self) -> Snapshot:
        cache, copies = self._open(), self._host.copies()
        state = stock_state(cache, copies) if self._keeps is None else cache.state(copies)
        tensors = dict(state.tensors) if self._next is None else {**state.tensors, "logits": self._next.cpu()}
        snapshot = Snapshot(
            fingerprint=self._engine.fingerprint,
            window=self._keeps,
            reindex=self._reindex,
            state=dict(state.numbers),
            parts={name: as_part(tensor) for name, tensor in tensors.items()},
        )
        weakref.finalize(snapshot, self._host.take_back, copies).atexit = False
        return snapshot

    @torch.inference_mode()
    def load(self, content: Content) -> NDArray[np.float32] | None:
        """Become the stream that was saved; the logits after its last token. Raises SnapshotError when that does not
        fit."""
        tensors = {name: as_tensor(array, content.dtypes[name]) for name, array in content.arrays.items()}
        logits = tensors.pop("logits", None)
        device = self._engine.model.device
        state = State(numbers=content.state, tensors={name: each.to(device) for name, each in tensors.items()})
        self._fill(state, content.path)
        self._next = None if logits is None else logits.to(device, copy=True)
        return None if logits is None else logits.numpy().copy()

    @abstractmethod
    def _fill(self, state: State, path: Path) -> None:
        """Put a state into the fresh cache."""

    @torch.inference_mode()  # recurrent layers of a model's own cache are zeroed in place
    def close(self) -> None:
        if self._cache is not None:
            self._cache.reset()
        self._cache, self._next = None, None


class StockRow:
    """The model's own cache as a row among others."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    @property
    def layers(self) -> list[Any]:
        return self._cache.layers

    def begin_one(self) -> int:
        return self._cache.get_seq_length()

    def end_one(self) -> None:
        pass


class WindowStream(TorchStream):
    """A conversation in a fixed budget, over a WindowCache."""

    def __init__(self, engine: Host, window: Window, *, reindex: bool) -> None:
        self.window = window
        cache = WindowCache(
            engine.model,
            window.budget,
            sinks=0,
            pinned=window.pins,
            block=window.block,
            reindex="auto" if reindex else "none",
            kv_dtype=engine.kv_dtype,
            examined=engine.examined(),
        )
        cache.stepwise = True
        super().__init__(engine, cache, reindex=reindex)
        self._keeps = window

    def _piece(self, count: int) -> int:
        return self._cache.exact_chunk(count)

    def row(self, token: int) -> Row | None:
        self._checked([token])
        return self._cache

    def _fill(self, state: State, path: Path) -> None:
        self._cache.load(state)

    @property
    def seen(self) -> int:
        return self._open().seen

    @property
    def kept(self) -> NDArray[np.int64]:
        return self._open().kept

    @property
    def held(self) -> int:
        return self._open().held

    @property
    def nbytes(self) -> int:
        return 0 if self._cache is None else self._cache.nbytes

    def evict(self, count: int) -> Evicted:
        start, stop = self._open().evict(count)
        return Evicted(start=start, stop=stop)

    def rollback(self, count: int) -> None:
        self._open().rollback(count)
        if count:
            self._next = None

    def skip(self, positions: int) -> None:
        self._open().skip(positions)


class PolicyStream(TorchStream):
    """A conversation of which every head keeps what a policy picks, over a PolicyCache."""

    window = None

    def __init__(self, engine: Host, policy: Policy[Any], *, reindex: bool) -> None:
        cache = PolicyCache(engine.model, policy, reindex="compact" if reindex else "none", examined=engine.examined())
        super().__init__(engine, cache, reindex=reindex)
        self._keeps = self._policy = policy

    def _piece(self, count: int) -> int:
        return self._cache.longest(count)

    def _forward(self, tokens: list[int], *, logits: int) -> torch.Tensor:
        with attach(self._engine.model):
            return super()._forward(tokens, logits=logits)

    def _fill(self, state: State, path: Path) -> None:
        self._cache.load(state)

    @property
    def seen(self) -> int:
        return self._open().seen

    @property
    def kept(self) -> NDArray[np.int64]:
        return self._open().kept

    @property
    def held(self) -> int:
        return self._open().held

    def oldest(self, pins: int) -> int:
        return self._open().oldest(pins)

    def kept_by_layer(self) -> dict[int, NDArray[np.int64]]:
        """Positions held by each layer, `[kv_heads, held]`."""
        return self._open().kept_by_layer()

    @property
    def nbytes(self) -> int:
        return 0 if self._cache is None else self._cache.nbytes

    def evict(self, count: int) -> Evicted:
        raise UsageError(f"cannot evict {count} tokens: {self._policy.name} picks what leaves, in every head")

    def rollback(self, count: int) -> None:
        self._open().rollback(count)
        if count:
            self._next = None


class GrowingStream(TorchStream):
    """A conversation that keeps everything, up to a limit, over the model's own cache."""

    window = None

    def __init__(self, engine: Host, limit: int, *, reindex: bool) -> None:
        super().__init__(engine, stock_cache(engine.model), reindex=reindex)
        self.limit_tokens = limit
        self._steady = read_rope(base_model(engine.model)).last_position is None
        """Whether no position changes the model's frequencies, which all rows of a step have in common."""

    def _checked(self, tokens: Sequence[int]) -> list[int]:
        checked = super()._checked(tokens)
        if self.seen + len(checked) > self.limit_tokens:
            raise ContextFull(
                f"{self.seen} tokens are held, {len(checked)} more do not fit the limit of {self.limit_tokens}; "
                f"start over, or choose a policy that evicts"
            )
        return checked

    def _piece(self, count: int) -> int:
        return count

    def row(self, token: int) -> Row | None:
        self._checked([token])
        return StockRow(self._cache) if self._steady else None

    def _fill(self, state: State, path: Path) -> None:
        load_stock(self._cache, state)
        if self.seen > self.limit_tokens:
            raise SnapshotError(f"{path} holds {self.seen} tokens, which do not fit the limit of {self.limit_tokens}")

    @property
    def seen(self) -> int:
        return self._open().get_seq_length()

    @property
    def kept(self) -> NDArray[np.int64]:
        return np.arange(self.seen, dtype=np.int64)

    @property
    def held(self) -> int:
        return self.seen

    @property
    def nbytes(self) -> int:
        return 0 if self._cache is None else stock_bytes(self._cache)

    def evict(self, count: int) -> Evicted:
        raise UsageError(f"cannot evict {count} tokens: this stream keeps everything")

    def rollback(self, count: int) -> None:
        if not 0 <= count <= self.seen:
            raise UsageError(f"cannot roll back {count} tokens: {self.seen} were fed")
        if count:
            try:
                self._cache.crop(-count)
            except RuntimeError as error:
                raise CacheStateError(f"cannot roll back {count} tokens: {error}") from error
            self._next = None
