"""The llama.cpp engine: a GGUF model behind the seam.

Knows options, what is refused before the first token, and how the parts fit: the library, the model, its contexts and
its streams. Does not know dialogue or sampling.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from headwater.engines.base import Engine, ModelFacts, Restored
from headwater.engines.llamacpp_cells import Pool, Settings
from headwater.engines.llamacpp_examined import Examined, examine, require_eviction
from headwater.engines.llamacpp_library import library
from headwater.engines.llamacpp_model import Model
from headwater.engines.llamacpp_stream import GrowingStream, LlamaCppStream, WindowStream
from headwater.engines.models import gguf_file
from headwater.engines.snapshot import Held, read_snapshot
from headwater.engines.template_text import render_template
from headwater.errors import BudgetError, UnsupportedCall, UnsupportedModel, UsageError
from headwater.policies import Policy
from headwater.policies.window import Window


class LlamaCppEngine(Engine):
    """A causal language model that llama.cpp runs."""

    supplies = frozenset()

    def __init__(self, model: Model, settings: Settings, *, template: str | None = None) -> None:
        """Raises UsageError for a kind of keys or values that the model's heads do not allow."""
        self.model, self.settings = model, settings
        self.name = model.name
        self.template = template or model.template
        self.context_length = model.context_length
        self.stop_tokens = model.stop_tokens
        self.examined: Examined = examine(model, settings)
        self._pool = Pool(model, settings, cell_bytes=self.examined.cell_bytes, fixed_bytes=self.examined.fixed_bytes)

    @classmethod
    def load(
        cls,
        model: str,
        *,
        type_k: str = "f16",
        type_v: str = "f16",
        n_threads: int | None = None,
        n_gpu_layers: int = -1,
        flash_attn: str = "auto",
        n_seq_max: int = 1,
        template: str | None = None,
    ) -> LlamaCppEngine:
        """Load a known name or a GGUF file. Options have llama.cpp's names: what keys and values are kept as, threads
        (all that this process may use), layers on the GPU (-1: all), flash attention (auto, on, off), and how many
        conversations share a context. `template` is Jinja text for models without one.

        Raises MissingExtra without a library, UnsupportedVersion for one that was never tested, ModelMissing,
        InputFileError, UsageError or ModelFileError for a model that cannot be loaded.
        """
        settings = Settings(
            type_k=type_k,
            type_v=type_v,
            n_threads=usable_threads() if n_threads is None else n_threads,
            flash_attn=flash_attn,
            n_seq_max=n_seq_max,
        )
        if not isinstance(n_gpu_layers, int) or isinstance(n_gpu_layers, bool) or n_gpu_layers < -1:
            raise UsageError(f"n_gpu_layers must be an integer of at least 0, or -1 for all, got {n_gpu_layers!r}")
        loaded = Model(library(), gguf_file(model), name=model, n_gpu_layers=n_gpu_layers)
        engine = cls(loaded, settings, template=template)
        if n_threads is None:
            engine.choices = (f"llama.cpp runs on {settings.n_threads} threads; n_threads says another number",)
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

    def open(self, window: Held, *, reindex: bool = True, limit_tokens: int | None = None) -> LlamaCppStream:
        if isinstance(window, Policy):
            raise UnsupportedCall(
                f"{window.name} keeps a set of its own in every head, and llama.cpp drops a token from all heads at "
                "once; these would work: sliding-window, streaming-llm, or the transformers engine"
            )
        if window is not None:
            if limit_tokens is not None:
                raise UsageError("limit_tokens is for a stream without a window; one with a window never ends")
            self._check_window(window, reindex=reindex)
            return WindowStream(self.model, self._pool, window, fingerprint=self.fingerprint, reindex=reindex)
        limit = self.context_length if limit_tokens is None else limit_tokens
        if not 1 <= limit <= self.context_length:
            raise BudgetError(
                f"limit_tokens must be between 1 and the trained length of {self.context_length}, got {limit}"
            )
        return GrowingStream(self.model, self._pool, limit, fingerprint=self.fingerprint, reindex=reindex)

    def _check_window(self, window: Window, *, reindex: bool) -> None:
        if window.budget >= self.context_length:
            raise BudgetError(
                f"a budget of {window.budget} tokens needs {window.budget + 1} positions, and {self.name} was trained "
                f"for {self.context_length}; lower the budget to {self.context_length - 1}"
            )
        require_eviction(self.examined)
        if not reindex and not self.model.rotary:
            raise UnsupportedModel(
                f"{self.name} has no rotary positions and was trained for {self.context_length}, which a stream that "
                "is not re-indexed runs past; leave reindex on"
            )

    @property
    def fingerprint(self) -> str:
        known = [self.model.fingerprint, self.settings.type_k, self.settings.type_v, self.settings.flash_attn]
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
        try:
            logits = stream.load(content)
        except BaseException:
            stream.close()
            raise
        return Restored(stream=stream, logits=logits, notes=content.notes)

    def facts(self) -> ModelFacts:
        model, settings = self.model, self.settings
        rotary = {
            key: value
            for key in ("rope.freq_base", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor")
            if (value := model.fact(f"{model.architecture}.{key}")) is not None
        }
        return ModelFacts(
            architecture=model.architecture,
            precision=f"{model.description}, keys {settings.type_k}, values {settings.type_v}",
            tokenizer_sha256=model.tokenizer_sha256,
            rotary=rotary,
        )

    def close(self) -> None:
        self._pool.close()


def usable_threads() -> int:
    """`OMP_NUM_THREADS`, or all processors that this process may use."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    if given.isdigit() and int(given) > 0:
        return int(given)
    usable = getattr(os, "sched_getaffinity", None)
    return len(usable(0)) if usable is not None else os.cpu_count() or 1
