"""What one key may ask for at a time.

Knows counts and a clock. Does not know requests. A rate is a bucket that fills evenly, so a pause is worth a burst.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """`tokens_in_flight` is the sum of `max_tokens` of the answers under way; `sessions` how many are kept."""

    requests_per_minute: int = 600
    tokens_in_flight: int = 65_536
    sessions: int = 10_000


@dataclass(slots=True, kw_only=True)
class Use:
    """What a key uses now."""

    limits: Limits
    clock: Callable[[], float]
    tokens: int = 0
    _bucket: float = field(init=False)
    _filled: float = field(init=False)

    def __post_init__(self) -> None:
        self._bucket, self._filled = float(self.limits.requests_per_minute), self.clock()

    def request(self) -> float:
        """Count a request; seconds to wait when it is one too many, else 0."""
        now, rate = self.clock(), self.limits.requests_per_minute / 60
        self._bucket = min(float(self.limits.requests_per_minute), self._bucket + max(0.0, now - self._filled) * rate)
        self._filled = now
        if self._bucket < 1:
            return (1 - self._bucket) / rate
        self._bucket -= 1
        return 0.0

    def begin(self, tokens: int) -> bool:
        """Count an answer of up to so many tokens; False when it is too much now."""
        if self.tokens + tokens > self.limits.tokens_in_flight:
            return False
        self.tokens += tokens
        return True

    def end(self, tokens: int) -> None:
        """The answer is over."""
        self.tokens -= tokens
