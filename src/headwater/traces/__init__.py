"""Attention, recorded or synthetic, and the replay of policies over it.

Knows weights as NumPy arrays, step by step. Does not know models or tensors: what a model paid comes in as a `Trace`.
"""

from __future__ import annotations

from headwater.traces.canonical import CanonicalTrace, canonical_trace
from headwater.traces.incremental_run import IncrementalPolicy
from headwater.traces.replay import replay, replay_all, replay_incremental
from headwater.traces.result import Replay
from headwater.traces.trace import ArrayTrace, Chunk, Head, Trace

__all__ = [
    "ArrayTrace",
    "CanonicalTrace",
    "Chunk",
    "Head",
    "IncrementalPolicy",
    "Replay",
    "Trace",
    "canonical_trace",
    "replay",
    "replay_all",
    "replay_incremental",
]
