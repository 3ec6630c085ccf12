"""The transformers engine: a torch model behind the seam.

Knows how to run a model forward with a cache and to bring logits over as NumPy arrays. Does not know eviction (the
cache does it), dialogue or sampling. Two kinds of stream: with a window, over a WindowCache; without, over the
model's own growing cache.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import torch
from numpy.typing import NDArray

from headwater.cache.adapter import (
    Examined,
    WindowCache,
    examine,
    load_stock,
    stock_bytes,
    stock_cache,
    stock_state,
)
from headwater.cache.host import HostMemory
from headwater.cache.saved import State
from headwater.engines.attention import Watcher
from headwater.engines.base import AttentionBlock, Engine, Evicted, ModelFacts, Restored, Stream
from headwater.engines.models import load, resolve
from headwater.engines.request import AttentionRequest, WeightType
from headwater.engines.snapshot import Content, Snapshot, read_snapshot
from headwater.engines.torch_parts import as_part, as_tensor, model_fingerprint
from headwater.errors import BudgetError, CacheStateError, ContextFull, SnapshotError, UnsupportedModel, UsageError
from headwater.policies.window import Window

CHUNK = 512
"""The most tokens in one forward pass."""

SCORED_CHUNK = 128
"""The same where the logits of every token are wanted: a vocabulary of 50,000 costs 200 kB a token."""


class TransformersEngine(Engine):
    """A causal language model of transformers with its tokenizer."""

    supplies = frozenset()

    def __init__(self, model: Any, tokenizer: Any, *, name: str, template: str | None = None) -> None:
        self.model: Any = model.eval()
        self.tokenizer: Any = tokenizer
        self.name = name
        self.template = template or tokenizer.chat_template
        self._watcher: Watcher | None = None
        self._fingerprint: str | None = None
        self._examined: dict[tuple[torch.dtype, torch.device], Examined] = {}
        text = model.config.get_text_config(decoder=True)
        self.vocab_size = int(text.vocab_size)
        self.context_length = int(getattr(text, "max_position_embeddings", 0) or 2**31)
        self.stop_tokens = frozenset(_ids(model.generation_config.eos_token_id) + _ids(tokenizer.eos_token_id))

    @classmethod
    def load(
        cls, model: str, *, dtype: str = "float32", device: str = "cpu", template: str | None = None
    ) -> TransformersEngine:
        """Load a known name, a folder, a GGUF file or a hub id; `template` is Jinja text for models without one."""
        resolved = resolve(model)
        loaded, tokenizer = load(resolved, dtype=dtype, device=device)
        return cls(loaded, tokenizer, name=model, template=template)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=not special))

    def decode(self, tokens: Iterable[int]) -> str:
        return self.tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def render(self, messages: Sequence[Mapping[str, str]], *, open_answer: bool) -> str:
        if not self.template:
            raise UnsupportedModel(
                f"{self.name} has no chat template; give one as Jinja text: headwater chat --template FILE, or "
                f"Chat.open(..., template=TEXT)"
            )
        try:
            return self.tokenizer.apply_chat_template(
                list(messages), chat_template=self.template, tokenize=False, add_generation_prompt=open_answer
            )
        except jinja2.TemplateError as error:
            roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
            raise UnsupportedModel(f"the chat template of {self.name} refuses the roles {roles}: {error}") from error

    def open(self, window: Window | None, *, reindex: bool = True, limit_tokens: int | None = None) -> _TorchStream:
        if window is not None:
            if limit_tokens is not None:
                raise UsageError("limit_tokens is for a stream without a window; one with a window never ends")
            return WindowStream(self, window, reindex=reindex)
        limit = self.context_length if limit_tokens is None else limit_tokens
        if not 1 <= limit <= self.context_length:
            raise BudgetError(
                f"limit_tokens must be between 1 and the trained length of {self.context_length}, got {limit}"
            )
        return GrowingStream(self, limit, reindex=reindex)

    def examined(self) -> Examined:
        """What the model caches, found out once, and again after it was moved or cast."""
        place = (self.model.dtype, self.model.device)
        if place not in self._examined:
            self._examined[place] = examine(self.model)
        return self._examined[place]

    @property
    def fingerprint(self) -> str:
        if self._fingerprint is None:
            self._fingerprint = model_fingerprint(self.model, self.facts())
        return self._fingerprint

    def restore(
        self,
        path: Path | str,
        window: Window | None,
        *,
        reindex: bool = True,
        limit_tokens: int | None = None,
        digest: str | None = None,
    ) -> Restored:
        content = read_snapshot(path, fingerprint=self.fingerprint, window=window, reindex=reindex, digest=digest)
        stream = self.open(window, reindex=reindex, limit_tokens=limit_tokens)
        logits = stream.load(content)
        return Restored(stream=stream, logits=logits, notes=content.notes)

    def facts(self) -> ModelFacts:
        fast = getattr(self.tokenizer, "backend_tokenizer", None)
        tokenizer = fast.to_str() if fast is not None else json.dumps(sorted(self.tokenizer.get_vocab().items()))
        return ModelFacts(
            architecture=type(self.model).__name__,
            precision=str(self.model.dtype).removeprefix("torch."),
            tokenizer_sha256=hashlib.sha256(tokenizer.encode()).hexdigest(),
            rotary=self.model.config.get_text_config(decoder=True).to_dict().get("rope_parameters") or {},
        )

    def attention_layers(self) -> tuple[int, ...]:
        return self._watching().layers

    def attention_heads(self) -> tuple[int, int]:
        watcher = self._watching()
        return len(watcher.layers), watcher.heads

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
            self,
            tokens,
            vocabulary=self.vocab_size,
            layers=layers,
            heads=heads,
            start=start,
            block=block,
            dtype=dtype,
        )
        return self._watching().blocks(request)

    def _watching(self) -> Watcher:
        if self._watcher is None:
            self._watcher = Watcher(self.model, self.name)
        return self._watcher

    def close(self) -> None:
        self.model = self.tokenizer = self._watcher = None


class _TorchStream(Stream):
    """What both kinds share: forward passes, and the prediction that the last one left."""

    def __init__(self, engine: TransformersEngine, cache: Any, *, reindex: bool = True) -> None:
        self._engine, self._reindex = engine, reindex
        self._cache: Any = cache
        self._next: torch.Tensor | None = None
        self._host = HostMemory()

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

    def _prediction(self) -> torch.Tensor:
        if self._next is None:
            raise UsageError("nothing predicts the first of these tokens; feed at least one token before scoring")
        return self._next

    def snapshot(self) -> Snapshot:
        cache, copies = self._open(), self._host.copies()
        state = cache.state(copies) if self.window is not None else stock_state(cache, copies)
        tensors = dict(state.tensors) if self._next is None else {**state.tensors, "logits": self._next.cpu()}
        snapshot = Snapshot(
            fingerprint=self._engine.fingerprint,
            window=self.window,
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


class WindowStream(_TorchStream):
    """A conversation in a fixed budget, over a WindowCache."""

    def __init__(self, engine: TransformersEngine, window: Window, *, reindex: bool) -> None:
        self.window = window
        cache = WindowCache(
            engine.model,
            window.budget,
            sinks=0,
            pinned=window.pins,
            block=window.block,
            reindex="auto" if reindex else "none",
            examined=engine.examined(),
        )
        cache.stepwise = True
        super().__init__(engine, cache, reindex=reindex)

    def _piece(self, count: int) -> int:
        return self._cache.exact_chunk(count)

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


class GrowingStream(_TorchStream):
    """A conversation that keeps everything, up to a limit, over the model's own cache."""

    window = None

    def __init__(self, engine: TransformersEngine, limit: int, *, reindex: bool) -> None:
        super().__init__(engine, stock_cache(engine.model), reindex=reindex)
        self.limit_tokens = limit

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


def _ids(value: Any) -> list[int]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [int(value)]
