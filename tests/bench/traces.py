"""Small traces with something to find in them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from headwater.traces import ArrayTrace, Head
from headwater.traces.facts import TraceFacts
from headwater.traces.store import TraceWriter

LAYERS, HEADS = (0, 3, 4), (1, 2)


def attention(tokens: int, rows: int, seed: int = 0) -> np.ndarray:
    """Causal attention of rows that lean on the first tokens, on the latest, or on a few of their own."""
    random = np.random.default_rng(seed)
    logits = 3 * random.standard_normal((rows, 1, tokens)) + random.standard_normal((rows, tokens, tokens))
    logits[::2, :, 0] += 5
    age = np.arange(tokens)[:, None] - np.arange(tokens)
    logits[1::2] -= 0.2 * age
    weights = np.where(age >= 0, np.exp(logits - logits.max(axis=2, keepdims=True)), 0)
    return (weights / weights.sum(axis=2, keepdims=True)).astype(np.float32)


def several_heads(tokens: int = 96) -> ArrayTrace:
    """Three layers that do not follow one another, two heads in each."""
    heads = tuple(Head(layer=layer, head=head) for layer in LAYERS for head in HEADS)
    return ArrayTrace(attention(tokens, len(heads)), name="several heads", heads=heads)


def recorded(folder: Path, tokens: int = 96) -> ArrayTrace:
    """`several_heads` with two heads in each of the layers, recorded into a folder."""
    trace = several_heads(tokens)
    facts = TraceFacts(
        model="tiny",
        architecture="tiny",
        precision="float32",
        tokenizer_sha256="0" * 64,
        rotary={},
        trained_length=tokens,
        text_name="nothing.txt",
        text_sha256="1" * 64,
        tokens=tuple(range(tokens)),
        layers=LAYERS,
        heads=HEADS,
        dtype="float32",
        created="2026-01-01T00:00:00+00:00",
        headwater="0",
    )
    weights = np.zeros((len(LAYERS), len(HEADS), tokens, tokens), dtype=np.float32)
    weights[:, :, 0, 0] = 1
    weights[:, :, 1:] = trace.whole().reshape(len(LAYERS), len(HEADS), tokens - 1, tokens)
    TraceWriter(folder, facts).append(0, weights)
    return trace
