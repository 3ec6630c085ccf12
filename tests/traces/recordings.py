"""Recordings for tests: facts, weights shaped like attention, and folders that hold them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from headwater.traces.facts import TraceFacts
from headwater.traces.store import RecordedTrace, TraceWriter


def facts(tokens: int = 300, *, layers: Sequence[int] = (0, 1, 5), heads: Sequence[int] = (0, 2), **changes: Any):
    made = TraceFacts(
        model="tiny",
        architecture="TinyForCausalLM",
        precision="float32",
        tokenizer_sha256="ab" * 32,
        rotary={"rope_type": "default", "rope_theta": 10000.0},
        trained_length=4096,
        text_name="a text",
        text_sha256="cd" * 32,
        tokens=tuple(range(tokens)),
        layers=tuple(layers),
        heads=tuple(heads),
        dtype="float16",
        created="2026-01-01T00:00:00+00:00",
        headwater="0.1.0",
    )
    return replace(made, **changes)


def weights(of: TraceFacts, seed: int = 0) -> np.ndarray:
    """`[layers, heads, tokens, positions]`, zero above the diagonal, in the type of the recording."""
    random = np.random.default_rng(seed).random(of.shape, dtype=np.float32)
    lower = np.tril(random**8)
    return (lower / lower.sum(-1, keepdims=True)).astype(of.dtype)


def append(writer: TraceWriter, whole: np.ndarray, stop: int, block: int | None = None) -> None:
    block = block or writer.band
    for first in range(writer.recorded, stop, block):
        end = min(first + block, stop)
        writer.append(first, whole[:, :, first:end, :end])


def record(folder: Path, of: TraceFacts, whole: np.ndarray, stop: int | None = None) -> RecordedTrace:
    append(TraceWriter(folder, of), whole, stop or len(of.tokens))
    return RecordedTrace(folder)
