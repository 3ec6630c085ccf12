"""The slow twin of the quantised ring: every token by itself, raw until it is quantised, number by number.

The fast path (`headwater.cache.quantised_ring`)   This path
1. int8 buffers addressed by number                1. a list of tokens
2. groups age at a commit, or inside a wide step   2. after every token, each one that is old enough is quantised
3. a vector's scale by amax, all at once           3. Python floats, one number after the other
4. keys of an earlier frame turned when read       4. every key turned from the angle it has to its place, at every
                                                      step, as a complex number in float64
5. an eviction moves `gone`                        5. an eviction filters the list

When tokens age, and in which frame a key is when it does, is part of what the cache promises: a group of `group` tokens
when the group after it is full, and the frame moves when the next position would be the frame's end. Verified by
`test_quantised.py::test_the_twin_without_rounding_is_the_twin_of_the_ring`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headwater.cache.bank import Shape
from headwater.policies.window import Window
from headwater.rotary import Rotation
from tests.reference.raw_keys import RawKeys, RawLayer, turn


def rounded(vector: list[float]) -> list[float]:
    """A vector as it comes back from int8."""
    scale = max(abs(number) for number in vector) / 127
    return [round(number / scale) * scale for number in vector] if scale else vector


def by_vector(tensor: Tensor) -> Tensor:
    """`[batch, heads, 1, dim]`, every vector rounded by itself."""
    flat = [rounded(vector) for vector in tensor.reshape(-1, tensor.shape[-1]).tolist()]
    return torch.tensor(flat, dtype=tensor.dtype).reshape(tensor.shape)


@dataclass
class Token:
    """One token of a layer; `angle` is the position that its key is turned to."""

    position: int
    key: Tensor
    value: Tensor
    angle: int = 0
    aged: bool = False


class QuantisedLayer(RawLayer):
    """One full-attention layer."""

    def __init__(
        self, rotation: Rotation | None, window: Window, *, frame: int, group: int, reindex: bool, rounds: bool
    ) -> None:
        super().__init__(rotation, window, slides=None, reindex=reindex)
        self.frame, self.group, self.rounds = frame, group, rounds
        self.tokens: list[Token] = []
        self.base = 0

    def forget(self) -> None:
        if len(self.positions) > self.window.budget:
            super().forget()
            self.tokens = [token for token in self.tokens if token.position in self.positions]
        pins = self.window.pins
        oldest_exact = pins + self.group * ((self.seen - pins) // self.group - 1)
        for token in self.tokens:
            if pins <= token.position < oldest_exact and not token.aged:
                self._age(token)
        if self.seen - self.base + 1 > self.frame:
            self.base = self.seen - len(self.tokens)

    def _age(self, token: Token) -> None:
        token.angle = token.position - self.base
        token.key = turn(token.key, [token.angle], self.rotation)
        if self.rounds:
            token.key, token.value = by_vector(token.key), by_vector(token.value)
        token.aged = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.tokens.append(Token(self.seen, key_states, value_states))
        self.positions.append(self.seen)
        self.kept.append((key_states, value_states))
        last = self.positions[-1]
        self.seen += 1
        keys: list[Tensor] = []
        for rank, token in enumerate(self.tokens):
            place = rank - len(self.tokens) + 1 if self.reindex else token.position - last
            keys.append(turn(token.key, [place - token.angle], self.rotation))
        return torch.cat(keys, dim=2), torch.cat([token.value for token in self.tokens], dim=2)


class QuantisedKeys(RawKeys):
    """The twin of a WindowCache in int8; layers that slide by themselves are those of RawKeys."""

    def __init__(
        self,
        shapes: list[Shape],
        slides: list[int | None],
        window: Window,
        *,
        frame: int,
        group: int,
        reindex: bool = True,
        rounds: bool = True,
    ) -> None:
        super().__init__(shapes, slides, window, reindex=reindex)
        for index, (shape, width) in enumerate(zip(shapes, slides, strict=True)):
            if width is None:
                self.raw[index] = self.layers[index] = QuantisedLayer(
                    shape.rotation, window, frame=frame, group=group, reindex=reindex, rounds=rounds
                )
