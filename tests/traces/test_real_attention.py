"""Real attention, in extracts of what `python -m bench.real_attention` recorded: smollm2, two layers, two heads, 256
tokens each of a book, a chat and source code."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headwater.policies import POLICIES, policy
from headwater.traces import replay_all
from headwater.traces.store import RecordedTrace

pytest.importorskip("zarr")
EXTRACTS = Path(__file__).parents[1] / "data" / "traces"
every_text = pytest.mark.parametrize("text", ["book", "chat", "code"])
BUDGET = 64


@every_text
def test_the_extracts_are_attention(text: str) -> None:
    trace = RecordedTrace(EXTRACTS / text)
    assert (trace.rows, trace.tokens, trace.layers) == (4, 256, (1, 15))
    np.testing.assert_allclose(trace.whole().sum(axis=2), 1, atol=2e-3)


@every_text
def test_every_way_gives_the_same_on_real_attention(text: str) -> None:
    """Attention in float16 has many equal weights and many zeros; rules and kernels choose alike all the same."""
    trace = RecordedTrace(EXTRACTS / text)
    policies = [policy(name, budget=trace.tokens if name == "full" else BUDGET) for name in POLICIES]
    for fast, slow in zip(replay_all(trace, policies), replay_all(trace, policies, by_rule=True), strict=True):
        assert np.array_equal(fast.left, slow.left)
        assert np.array_equal(fast.hits, slow.hits)
        np.testing.assert_allclose(fast.mass, slow.mass, rtol=1e-12)


@every_text
def test_the_deep_heads_need_their_sink(text: str) -> None:
    """In layer 15 a window loses far more without the first token than with it; in layer 1 it makes no difference."""
    trace = RecordedTrace(EXTRACTS / text)
    window, sinks = replay_all(trace, [policy(name, budget=BUDGET) for name in ("sliding-window", "streaming-llm")])
    shallow, deep = (sinks.mass_by_row - window.mass_by_row).reshape(2, 2).mean(axis=1)
    assert abs(shallow) < 0.03
    assert deep > 0.2


@every_text
def test_tova_looks_and_wins(text: str) -> None:
    trace = RecordedTrace(EXTRACTS / text)
    names = [name for name in POLICIES if name not in ("full", "pyramidkv")]
    found = replay_all(trace, [policy(name, budget=BUDGET) for name in names])
    mass = dict(zip(names, (each.retained_attention_mass for each in found), strict=True))
    assert max(mass, key=lambda name: mass[name]) == "tova"
    assert min(mass, key=lambda name: mass[name]) in ("random", "sliding-window")
