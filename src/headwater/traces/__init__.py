"""Attention, recorded or synthetic, and the replay of policies over it.

Knows weights as NumPy arrays, step by step. Does not know models or tensors: what a model paid comes in as a `Trace`.
"""

from __future__ import annotations

from headwater.traces.replay import Replay, replay, replay_all
from headwater.traces.trace import ArrayTrace, Chunk, Head, Trace

__all__ = ["ArrayTrace", "Chunk", "Head", "Replay", "Trace", "replay", "replay_all"]
