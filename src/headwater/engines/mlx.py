"""The MLX engine: a model of mlx-lm behind the seam.

Knows options, what is refused before the first token, and how the parts fit: the model, its cells and its streams. Does
not know dialogue or sampling. Nothing here asks for a GPU: where MLX has one, it is what MLX takes.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.engines.base import Engine, ModelFacts, Restored
from headwater.engines.mlx_library import core
from headwater.engines.snapshot import Held, read_snapshot
from headwater.engines.template_text import render_template
from headwater.errors import BudgetError, UnknownName, UnsupportedCall, UnsupportedModel, UsageError
from headwater.policies import Policy
from headwater.policies.window import Window

if TYPE_CHECKING:
    from headwater.engines.mlx_cells import Cells
    from headwater.engines.mlx_model import Model
    from headwater.engines.mlx_stream import MlxStream

KV_BITS = (0, 8)


class MlxEngine(Engine):
    """A causal language model that MLX runs."""

    supplies = frozenset()

    def __init__(self, model: Model, *, kv_bits: int = 0, template: str | None = None) -> None:
        """Raises UnsupportedModel for layers that are not of keys and values, UsageError for 8 bits where the model's
        heads do not allow them."""
        from headwater.engines.mlx_examined import examine

        if kv_bits not in KV_BITS or isinstance(kv_bits, bool):
            raise UsageError(f"kv_bits must be 0, for the model's own precision, or 8, got {kv_bits!r}")
        self.model, self.kv_bits = model, kv_bits
        self.name = model.name
        self.net: Any = model.net
        self.template = template or model.template
        self.context_length, self.stop_tokens = model.context_length, model.stop_tokens
        self.vocab_size = model.vocab_size
        self.lock, self.closed = threading.RLock(), False
        self.examined = examine(self.net, self.name, self.vocab_size)
        self.cells(1)

    @classmethod
    def load(cls, model: str, *, dtype: str = "auto", kv_bits: int = 0, template: str | None = None) -> MlxEngine:
        """Load a known name, a folder of safetensors or a GGUF file. `dtype` is what is computed in (auto: as the model
        is stored, and float32 on a CPU), `kv_bits` what keys and values are kept in (0: the same; 8), by the names that
        mlx-lm has for them. `template` is Jinja text for models without one.

        Raises MissingExtra without MLX, ModelMissing, InputFileError, UsageError, UnsupportedModel or ModelFileError
        for a model that cannot be loaded.
        """
        core()
        from headwater.engines.mlx_model import DTYPES, Model

        if dtype not in DTYPES:
            raise UnknownName("dtype", dtype, DTYPES)
        loaded = Model(model, dtype=dtype)
        engine = cls(loaded, kv_bits=kv_bits, template=template)
        if dtype == "auto" and loaded.dtype != "auto":
            engine.choices = (f"MLX computes in {loaded.dtype} on this machine's CPU; dtype says another kind",)
        return engine

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        return self.model.encode(text, special=special)

    def decode(self, tokens: Iterable[int]) -> str:
        return self.model.decode(tokens)

    def render(self, messages: Sequence[Mapping[str, str]], *, open_answer: bool) -> str:
        if not self.template:
            raise UnsupportedModel(
                f"{self.name} has no chat template; give one as Jinja text: headwater chat --template FILE, or "
                f"Chat.open(..., template=TEXT)"
            )
        return render_template(
            self.template,
            messages,
            open_answer=open_answer,
            name=self.name,
            bos=self.model.special("bos"),
            eos=self.model.special("eos"),
        )

    def cells(self, slots: int) -> list[Cells]:
        """Empty cells for every layer."""
        from headwater.engines.mlx_cells import CELLS

        return [CELLS[self.kv_bits](shape, slots) for shape in self.examined.layers]

    def open(self, window: Held, *, reindex: bool = True, limit_tokens: int | None = None) -> MlxStream:
        from headwater.engines.mlx_examined import require_eviction
        from headwater.engines.mlx_stream import MlxStream

        if isinstance(window, Policy):
            raise UnsupportedCall(
                f"{window.name} keeps a set of its own in every head, and this engine drops a token from all heads at "
                "once; these would work: sliding-window, streaming-llm, or the transformers engine"
            )
        if window is not None:
            if limit_tokens is not None:
                raise UsageError("limit_tokens is for a stream without a window; one with a window never ends")
            self._check_budget(window)
            require_eviction(self.examined)
        limit = self.context_length if limit_tokens is None else limit_tokens
        if not 1 <= limit <= self.context_length:
            raise BudgetError(
                f"limit_tokens must be between 1 and the trained length of {self.context_length}, got {limit}"
            )
        return MlxStream(self, window, limit_tokens=limit, reindex=reindex)

    def _check_budget(self, window: Window) -> None:
        if window.budget >= self.context_length:
            raise BudgetError(
                f"a budget of {window.budget} tokens needs {window.budget + 1} positions, and {self.name} was trained "
                f"for {self.context_length}; lower the budget to {self.context_length - 1}"
            )

    @property
    def fingerprint(self) -> str:
        known = [self.model.fingerprint, self.model.dtype, self.kv_bits]
        return hashlib.sha256(json.dumps(known).encode()).hexdigest()

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
        kept = "as it computes" if self.kv_bits == 0 else f"keys and values in {self.kv_bits} bits"
        return ModelFacts(
            architecture=self.model.architecture,
            precision=f"{self.model.dtype}, {kept}",
            tokenizer_sha256=self.model.tokenizer_sha256,
            rotary=self.model.rotary,
        )

    def close(self) -> None:
        self.closed = True
        self.net = None
