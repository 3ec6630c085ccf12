"""Texts as vectors: the seam, and the small model that fills it.

Knows how a text becomes a vector of unit length. Does not know what is searched.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from jaxtyping import Float32

from headwater.errors import MemoryFault, MissingExtra

WEIGHTS = ("weights", "l2_supercat_256.safetensors")
TOKENIZER = ("tokenizers", "l2_supercat_tokenizer_config.json")


class Embedder(Protocol):
    """Turns texts into vectors. `name` changes whenever the vectors of a text would."""

    name: str
    dim: int

    def embed(self, texts: Sequence[str]) -> Float32[np.ndarray, "texts dim"]:
        """A vector of unit length for each text; zeros for a text with nothing in it."""
        ...


class StaticEmbedder:
    """The mean of static token vectors: 256 numbers for each of 32,000 tokens, from the package wordllama.

    A lookup and a mean: tens of thousands of passages a second on one core, and nothing is downloaded. The vectors are
    those of WordLlama (Miller, 2024, github.com/dleemiller/WordLlama), read from its wheel. Raises MissingExtra when it
    is not installed, MemoryFault when its files are not those that are known.
    """

    name = "wordllama-l2-supercat-256"

    def __init__(self) -> None:
        try:
            spec = importlib.util.find_spec("wordllama")
            from tokenizers import Tokenizer
        except ModuleNotFoundError as error:
            raise MissingExtra(error.name or "tokenizers", "memory") from error
        if spec is None or not spec.submodule_search_locations:
            raise MissingExtra("wordllama", "memory")
        folder = Path(spec.submodule_search_locations[0])
        try:
            self._tokenizer = Tokenizer.from_file(str(folder.joinpath(*TOKENIZER)))
            self._vectors = _read_weights(folder.joinpath(*WEIGHTS))
        except Exception as error:  # of several libraries, for files that are not there or not as they should be
            raise MemoryFault(f"the vectors in {folder} cannot be read: {error}") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.dim = self._vectors.shape[1]

    def embed(self, texts: Sequence[str]) -> Float32[np.ndarray, "texts dim"]:
        out = np.zeros((len(texts), self.dim), dtype=np.float32)
        for row, encoded in enumerate(self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)):
            if encoded.ids:
                out[row] = self._vectors[encoded.ids].mean(axis=0, dtype=np.float32)
        return unit(out)


def unit(vectors: Float32[np.ndarray, "rows dim"]) -> Float32[np.ndarray, "rows dim"]:
    """The same directions with length 1; zeros stay zeros."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.divide(vectors, lengths, out=np.zeros_like(vectors), where=lengths > 0)


def _read_weights(path: Path) -> np.ndarray:
    """The one tensor of a safetensors file, as float16."""
    raw = np.fromfile(path, dtype=np.uint8)
    length = int.from_bytes(raw[:8].tobytes(), "little")
    entries = {k: v for k, v in json.loads(raw[8 : 8 + length].tobytes()).items() if k != "__metadata__"}
    (entry,) = entries.values()
    start, stop = entry["data_offsets"]
    return raw[8 + length + start : 8 + length + stop].view(np.float16).reshape(entry["shape"])
