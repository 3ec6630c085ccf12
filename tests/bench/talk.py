"""What the tests of the bench share: short conversations, settings, a clock that ticks evenly."""

from __future__ import annotations

from collections.abc import Callable

from headwater.bench.conversation import Conversation, Exchange
from headwater.bench.results import Settings
from headwater.bench.rows import DEFAULT_ROWS
from headwater.engines.fake import FakeEngine


def conversation(exchanges: int = 12, system: str | None = "Be kind.") -> Conversation:
    said = tuple(Exchange(question=f"Question {i}?", answer=f"This is answer {i}.") for i in range(exchanges))
    return Conversation(name="talk", sha256="0" * 64, exchanges=said, system=system)


def settings(
    *, budget: int = 128, policies: tuple[str, ...] = DEFAULT_ROWS, limit: int = 400, sinks: int = 4, seed: int = 0
) -> Settings:
    return Settings(
        budget_tokens=budget,
        sinks=sinks,
        policies=policies,
        limit_tokens=limit,
        turns=None,
        system="Be kind.",
        seed=seed,
    )


def engine(context_length: int = 8192) -> FakeEngine:
    return FakeEngine(context_length=context_length)


def ticking(step: float = 0.25) -> Callable[[], float]:
    """A clock that moves by `step` whenever it is read."""
    now = [0.0]

    def read() -> float:
        now[0] += step
        return now[0]

    return read
