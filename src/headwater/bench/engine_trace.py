"""The attention of a model over a list of tokens as a trace that is made while it is read, and kept nowhere.

Knows how an engine's blocks become chunks. Does not know policies, conversations or files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from headwater.engines.base import Engine
from headwater.traces import Chunk, Head, Trace
from headwater.traces.trace import CHUNK_BYTES, steps_per_chunk

LARGEST_BLOCK = 128
"""Tokens in one forward pass, at most: more of them are not faster."""


class EngineTrace(Trace):
    """Every head that the engine shows. Each reading runs the model once over the tokens; memory is one chunk.

    Raises UnsupportedCall for an engine that shows no attention, ContextFull for more tokens than the model was trained
    for, UsageError for an unknown token id or none, before anything runs.
    """

    def __init__(self, engine: Engine, tokens: Sequence[int], *, name: str) -> None:
        self.name, self.tokens = name, len(tokens)
        self._engine, self._ids = engine, tuple(tokens)
        heads = range(engine.attention_heads()[1])
        self.heads = tuple(Head(layer=layer, head=head) for layer in engine.attention_layers() for head in heads)
        engine.attention(self._ids)

    def chunks(self, chunk_bytes: int = CHUNK_BYTES) -> Iterator[Chunk]:
        block = min(LARGEST_BLOCK, steps_per_chunk(chunk_bytes, rows=self.rows, tokens=self.tokens))
        if not self.steps:
            return
        for paid in self._engine.attention(self._ids, start=1, block=block, dtype=np.float32):
            yield Chunk(first=paid.first, weights=paid.weights.reshape(self.rows, *paid.weights.shape[2:]))
            # If it were still named while the next one is made, it would be in memory with it.
            del paid
