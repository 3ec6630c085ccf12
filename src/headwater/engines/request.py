"""What is asked of an engine's attention, checked before anything runs.

Knows which tokens, layers, heads and blocks make sense for an engine. Does not know how weights are computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from headwater.engines.base import Engine
from headwater.errors import ContextFull, UsageError

WeightType = type[np.float32] | type[np.float16]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRequest:
    """A request that can be answered: every layer and head is there, and the tokens fit the model."""

    tokens: tuple[int, ...]
    layers: tuple[int, ...]
    heads: tuple[int, ...]
    start: int
    block: int
    dtype: WeightType

    @classmethod
    def checked(
        cls,
        engine: Engine,
        tokens: Sequence[int],
        *,
        vocabulary: int,
        layers: Sequence[int] | None,
        heads: Sequence[int] | None,
        start: int,
        block: int,
        dtype: WeightType,
    ) -> AttentionRequest:
        """The request with what was left open filled in. Raises what `Engine.attention` says."""
        watched, count = engine.attention_layers(), engine.attention_heads()[1]
        return cls(
            tokens=_tokens(engine, tokens, vocabulary),
            layers=watched if layers is None else _named("layer", layers, watched, f"{engine.name} shows"),
            heads=tuple(range(count)) if heads is None else _named("head", heads, range(count), "every layer has"),
            start=_within("start", start, 0, len(tokens) - 1, f"one of the {len(tokens)} tokens"),
            block=_within("block", block, 1, None, "the tokens in one forward pass"),
            dtype=_weight_type(dtype),
        )

    def blocks(self) -> Iterator[range]:
        """The tokens to watch, in order, a range for each block."""
        for first in range(self.start, len(self.tokens), self.block):
            yield range(first, min(first + self.block, len(self.tokens)))


def _tokens(engine: Engine, tokens: Sequence[int], vocabulary: int) -> tuple[int, ...]:
    ids = tuple(int(token) for token in tokens)
    if not ids:
        raise UsageError("no tokens to watch; give at least one")
    for token in ids:
        if not 0 <= token < vocabulary:
            raise UsageError(f"unknown token id {token}; ids run from 0 to {vocabulary - 1}")
    if len(ids) > engine.context_length:
        raise ContextFull(
            f"{len(ids)} tokens are longer than {engine.name} was trained for ({engine.context_length}), and past that "
            f"its attention means nothing; give at most {engine.context_length}"
        )
    return ids


def _named(kind: str, asked: Sequence[int], known: Sequence[int], whose: str) -> tuple[int, ...]:
    if not len(asked):
        raise UsageError(f"no {kind}s to watch; name at least one, or leave {kind}s out for all")
    for index, number in enumerate(asked):
        if number not in known:
            raise UsageError(f"there is no {kind} {number} to watch; {whose} {kind}s {spans(known)}")
        if number in asked[:index]:
            raise UsageError(f"{kind} {number} is named twice; name each {kind} once")
    return tuple(int(number) for number in asked)


def spans(numbers: Sequence[int]) -> str:
    """Ascending numbers as people write them: `0-2, 5`."""
    parts: list[str] = []
    for number in numbers:
        if parts and int(parts[-1].rpartition("-")[2]) == number - 1:
            parts[-1] = f"{parts[-1].partition('-')[0]}-{number}"
        else:
            parts.append(str(number))
    return ", ".join(parts)


def _within(name: str, value: int, least: int, most: int | None, what: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least or (most is not None and value > most):
        allowed = f"at least {least}" if most is None else f"{least} to {most}"
        raise UsageError(f"{name} must be an integer of {allowed} ({what}), got {value!r}")
    return value


def _weight_type(dtype: WeightType) -> WeightType:
    if dtype not in (np.float32, np.float16):
        raise UsageError(f"dtype must be numpy.float32 or numpy.float16, got {dtype!r}")
    return dtype
