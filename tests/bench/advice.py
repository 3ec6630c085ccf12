"""What the tests of the advice share: rows made by hand, and a short experiment on the fake engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headwater.bench.advise import experiment
from headwater.bench.advise_results import CURVE, AdviseResults, Asked, Row
from headwater.engines.fake import FakeEngine
from tests.bench.talk import conversation


def made(policy: str, budget: int, mass: float, **changes: Any) -> Row:
    """A row; the figures that are not given are alike for all."""
    row = Row(
        policy=policy,
        budget=budget,
        role=CURVE,
        parameters={},
        recent_window=None,
        live=policy in ("sliding-window", "streaming-llm"),
        retained_attention_mass=mass,
        heavy_hitter_recall=0.5,
        mass_low=0.1,
        mass_high=0.9,
        eviction_calls=1,
        cache_bytes=100,
        state_bytes=10,
        way="rule",
    )
    return replace(row, **changes)


def advised(exchanges: int = 8, engine: FakeEngine | None = None, **asked: Any) -> AdviseResults:
    """The advice on a short conversation; eight exchanges are about five hundred tokens."""
    return experiment(engine or FakeEngine(), conversation(exchanges), Asked(**asked), engine_name="fake")
