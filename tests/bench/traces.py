"""Small traces with something to find in them."""

from __future__ import annotations

import numpy as np

from headwater.traces import ArrayTrace, Head

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
