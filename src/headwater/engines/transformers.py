"""The transformers engine: a torch model behind the seam.

Knows models, tokenizers and templates of transformers, and what a model shows of itself. Does not know how a stream
runs it (`torch_streams`), dialogue or sampling.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import torch
from numpy.typing import NDArray

from headwater.cache.adapter import refuse_kv_dtype, ring_kind
from headwater.cache.hosted import Examined, examine
from headwater.engines.attention import Watcher
from headwater.engines.base import AttentionBlock, Engine, ModelFacts, Restored, Stream
from headwater.engines.models import load, resolve
from headwater.engines.request import AttentionRequest, WeightType
from headwater.engines.snapshot import Held, read_snapshot
from headwater.engines.torch_parts import model_fingerprint
from headwater.engines.torch_streams import GrowingStream, PolicyStream, TorchStream, WindowStream
from headwater.engines.torch_together import Together
from headwater.errors import BudgetError, CacheStateError, UnsupportedModel, UsageError
from headwater.policies import Policy
from headwater.policies.signals import ATTENTION


class TransformersEngine(Engine):
    """A causal language model of transformers with its tokenizer."""

    supplies = frozenset({ATTENTION})

    def __init__(
        self, model: Any, tokenizer: Any, *, name: str, template: str | None = None, kv_dtype: str | None = None
    ) -> None:
        self.model: Any = model.eval()
        self.tokenizer: Any = tokenizer
        self.name = name
        self.template = template or tokenizer.chat_template
        self.kv_dtype = kv_dtype
        ring_kind(kv_dtype)
        if kv_dtype is not None:
            self.choices = (f"K and V are {kv_dtype} under a window; what keeps everything has the model's precision",)
        self._watcher: Watcher | None = None
        self._together: Together | None = Together(self.model)
        self._fingerprint: str | None = None
        self._examined: dict[tuple[torch.dtype, torch.device], Examined] = {}
        text = model.config.get_text_config(decoder=True)
        self.vocab_size = int(text.vocab_size)
        self.context_length = int(getattr(text, "max_position_embeddings", 0) or 2**31)
        self.stop_tokens = frozenset(_ids(model.generation_config.eos_token_id) + _ids(tokenizer.eos_token_id))

    @classmethod
    def load(
        cls,
        model: str,
        *,
        dtype: str = "float32",
        device: str = "cpu",
        template: str | None = None,
        kv_dtype: str | None = None,
    ) -> TransformersEngine:
        """Load a known name, a folder, a GGUF file or a hub id; `template` is Jinja text for models without one,
        `kv_dtype` what K and V are kept as under a window (see WindowCache)."""
        ring_kind(kv_dtype)  # before a model is loaded
        resolved = resolve(model)
        loaded, tokenizer = load(resolved, dtype=dtype, device=device)
        return cls(loaded, tokenizer, name=model, template=template, kv_dtype=kv_dtype)

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

    def open(self, window: Held, *, reindex: bool = True, limit_tokens: int | None = None) -> TorchStream:
        if window is not None and limit_tokens is not None:
            raise UsageError("limit_tokens is for a stream without a window; one with a window never ends")
        if isinstance(window, Policy):
            refuse_kv_dtype(self.kv_dtype, window.name)
            return PolicyStream(self, window, reindex=reindex)
        if window is not None:
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
    def apart(self) -> str | None:
        return self._stepping().refusal

    def feed_together(self, streams: Sequence[Stream], tokens: Sequence[int]) -> list[NDArray[np.float32] | Exception]:
        return self._stepping().feed(streams, tokens)

    def _stepping(self) -> Together:
        if self._together is None:
            raise CacheStateError("the engine is closed; open a new one")
        return self._together

    @property
    def fingerprint(self) -> str:
        if self._fingerprint is None:
            self._fingerprint = model_fingerprint(self.model, self.facts(), self.kv_dtype)
        return self._fingerprint

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
        self.model = self.tokenizer = self._watcher = self._together = None


def _ids(value: Any) -> list[int]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [int(value)]
