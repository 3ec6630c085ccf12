"""A replay of an object that somebody brought: the incremental contract of the specification, one object for each row.

Knows the contract and checks every answer. Nothing needs to be derived from a class of this library.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
from jaxtyping import Bool, Float32

from headwater.errors import PolicyFault, UnsupportedCall
from headwater.policies import Policy, Slots
from headwater.policies.signals import NoSignal
from headwater.traces.result import RULE, Replay, Tally
from headwater.traces.run import Heavy, Run
from headwater.traces.trace import Chunk, Trace


class IncrementalPolicy(Protocol):
    """What an object must do to be replayed. It begins with position 0 held."""

    def on_decode_step(self, position: int, weights: Any, /) -> object:
        """Apply the weights of the positions held, ascending, then hold `position` too.

        They come as a float32 array, `[held]`; an object may ask for any sequence of floats.
        """
        ...

    def evict(self, budget: int, /) -> Sequence[int]:
        """Let go of positions until at most `budget` are held; return those."""
        ...

    def kept_count(self) -> int:
        """How many positions are held."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Brought(Policy[None]):
    """Stands for such an object in a `Replay`: its name and budget. It has no rule that could be asked."""

    name: ClassVar[str] = "incremental"
    summary: ClassVar[str] = "what an object that was brought decides"
    source: ClassVar[str] = "whoever brought it"

    @property
    def signal(self) -> NoSignal:
        return NoSignal()

    def protected(self, slots: Slots[None]) -> Bool[np.ndarray, "rows slots"]:
        raise UnsupportedCall(f"{self.name} was replayed as an object of the incremental contract; it has no rule")


class IncrementalRun(Run):
    """One object for each row, all rows in one part. Raises BudgetError for a budget that is none."""

    def __init__(self, trace: Trace, make: Callable[[], IncrementalPolicy], *, budget: int, name: str) -> None:
        self.parts = (slice(0, trace.rows),)
        self._policy = type("Brought", (Brought,), {"name": name, "__slots__": ()})(budget=budget)
        self._tally = Tally(trace)
        self._rows = [_Row(self._policy, make(), row, self._tally) for row in range(trace.rows)]

    def advance(self, part: int, chunk: Chunk, heavy: Heavy) -> None:
        for index, now in enumerate(chunk.steps):
            for row, driven in enumerate(self._rows):
                driven.step(now, chunk.weights[row, index, : now + 1], heavy[row, index])

    def results(self) -> list[Replay]:
        return [self._tally.replay(self._policy, RULE)]


class _Row:
    """One object, what it holds by the harness's own account, and where its figures go."""

    def __init__(self, policy: Policy[Any], driven: IncrementalPolicy, row: int, tally: Tally) -> None:
        self.name, self.budget, self.driven, self.row = policy.name, policy.budget, driven, row
        self.mass, self.hits, self.left = tally.mass[row], tally.hits[row], tally.left[row]
        self.evictions = tally.evictions[row : row + 1]
        self.held = np.zeros(tally.tokens, dtype=bool)
        self.held[0] = True

    def step(self, now: int, weights: Float32[np.ndarray, " positions"], heavy: np.ndarray) -> None:
        shown = weights[:now][self.held[:now]]
        self.mass[now - 1] = (np.cumsum(shown, dtype=np.float64)[-1] if len(shown) else 0.0) + weights[now]
        self.hits[now - 1] = self.held[heavy[heavy >= 0]].sum()
        self.driven.on_decode_step(now, shown)
        self.held[now] = True
        if self.held.sum() > self.budget:
            self.evictions += 1
            for victim in self.driven.evict(self.budget):
                self._let_go(victim, now)
        self._check_count(now)

    def _let_go(self, victim: object, now: int) -> None:
        if not isinstance(victim, (int, np.integer)) or isinstance(victim, bool) or not 0 <= victim < len(self.held):
            raise PolicyFault(
                f"{self.name}: a victim is an integer in 0..{len(self.held) - 1}, got {victim!r} at step {now}, "
                f"row {self.row}"
            )
        if not self.held[victim]:
            why = f"it left after step {self.left[victim]}" if victim <= now else "it was not seen yet"
            raise PolicyFault(f"{self.name}: victim {victim} is not held at step {now}, row {self.row}; {why}")
        self.held[victim] = False
        self.left[victim] = now

    def _check_count(self, now: int) -> None:
        held, said = int(self.held.sum()), self.driven.kept_count()
        if held > self.budget:
            raise PolicyFault(
                f"{self.name}: {held} positions are held after the eviction of step {now}, row {self.row}; the budget "
                f"is {self.budget}"
            )
        if said != held:
            raise PolicyFault(
                f"{self.name}: kept_count() says {said} after step {now}, row {self.row}, and {held} positions are held"
            )
