"""From logits to a token: the one place where an answer is decided by chance.

Knows NumPy logits, a seed and the usual knobs. Does not know models or text, so it is the same for every engine.

The order is that of transformers' `generate`: repetition penalty, temperature, top-k, top-p, min-p, then the draw.

- repetition penalty (Keskar et al., "CTRL", 2019, arXiv 1909.05858): the logit of every token in the context is divided
  by it when positive and multiplied by it when negative. The context is what the cache holds, no more.
- temperature divides the logits; 0 takes the largest (of equals the lowest id) and makes the other knobs moot.
- top-k (Fan et al., 2018, arXiv 1805.04833) keeps the k largest logits.
- top-p (Holtzman et al., 2020, arXiv 1904.09751) keeps the smallest set of the most probable tokens that together have
  at least probability p.
- min-p (Nguyen et al., 2024, arXiv 2407.01082) keeps the tokens with at least p times the largest probability.

Tokens that tie with the last one kept are kept too, so no result depends on the order in which equals are sorted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwater.errors import UnsupportedModel, UsageError

_REACH = (4.0, 8.0, 16.0, math.inf)
"""How far below the largest score to look, nearest first: a few hundred are sorted sooner than a vocabulary."""

_LEAST = 1e-37
"""Weights below are zero: no draw of 53 bits could ever find them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is chosen. Raises UsageError for a value outside its range.

    `top_k` 0, `top_p` 1, `min_p` 0 and `repetition_penalty` 1 switch that knob off. Without a `seed` every conversation
    is different; with one, the same messages give the same answers.
    """

    temperature: float = 0.7
    top_k: int = 50
    top_p: float = 0.95
    min_p: float = 0.0
    repetition_penalty: float = 1.1
    seed: int | None = None

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise UsageError(f"{name} must be a finite number, got {value!r}")
        for name in ("top_k", "seed"):
            value = getattr(self, name)
            if name == "seed" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise UsageError(f"{name} must be an integer of at least 0, got {value!r}")
        if self.temperature != 0 and self.temperature < 0.001:
            raise UsageError(f"temperature must be 0 (greedy) or at least 0.001, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top_p must be above 0 and at most 1 (1 is off), got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise UsageError(f"min_p must be between 0 (off) and 1, got {self.min_p}")
        if self.repetition_penalty <= 0:
            raise UsageError(f"repetition_penalty must be above 0 (1 is off), got {self.repetition_penalty}")


class Sampler:
    """Draws tokens with a generator of its own; two samplers of one seed draw alike."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self._random = np.random.default_rng(sampling.seed)

    @property
    def state(self) -> dict[str, Any]:
        """Where the generator is, as JSON allows; a sampler that is given it draws what this one would."""
        return dict(self._random.bit_generator.state)

    @state.setter
    def state(self, state: Mapping[str, Any]) -> None:
        self._random.bit_generator.state = dict(state)

    @property
    def wants_context(self) -> bool:
        """Whether `draw` looks at its context at all."""
        return self.sampling.repetition_penalty != 1

    def draw(self, logits: NDArray[np.float32], context: Sequence[int] | NDArray[np.int64] = ()) -> int:
        """One token id. `logits` is `[vocab]` and stays as it is; `context` holds the ids that the penalty is for.

        Raises UnsupportedModel when the logits are no numbers.
        """
        scores = _penalised(logits, context, self.sampling.repetition_penalty)
        best = int(scores.argmax())
        if not math.isfinite(scores[best]):
            raise UnsupportedModel(f"the model's largest logit is {scores[best]}; try another dtype, such as float32")
        if self.sampling.temperature == 0:
            return best
        ids, weights = _candidates(scores - scores[best], self.sampling)
        sums = np.cumsum(weights, dtype=np.float64)
        place = int(np.searchsorted(sums, self._random.random() * sums[-1], side="right"))
        return int(ids[min(place, len(ids) - 1)])


def _penalised(
    logits: NDArray[np.float32], context: Sequence[int] | NDArray[np.int64], penalty: float
) -> NDArray[np.float32]:
    if penalty == 1 or not len(context):
        return logits
    scores = logits.copy()
    there = np.unique(np.asarray(context, dtype=np.int64))
    chosen = scores[there]
    scores[there] = np.where(chosen > 0, chosen / penalty, chosen * penalty)
    return scores


def _candidates(scaled: NDArray[np.float32], sampling: Sampling) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Ids that may be drawn, ascending, and their weights relative to the largest.

    `scaled` has its maximum at 0 and is used up: on a large vocabulary every further array costs as much as the sum.
    """
    with np.errstate(over="ignore"):
        scaled /= sampling.temperature
    ids = None
    if 0 < sampling.top_k < len(scaled):
        ids = np.flatnonzero(scaled >= _top_k_floor(scaled, sampling.top_k))
        scaled = scaled[ids]
    weights = np.exp(scaled, out=scaled)
    floor = max(_top_p_floor(weights, sampling.top_p), sampling.min_p, _LEAST)
    keep = np.flatnonzero(weights >= floor)
    return keep if ids is None else ids[keep], weights[keep]


def _top_k_floor(scaled: NDArray[np.float32], top_k: int) -> float:
    """The k-th largest score, looked for among the likely ones first."""
    likely = scaled
    for reach in _REACH:
        likely = scaled[scaled >= -reach]
        if len(likely) >= top_k:
            break
    return float(np.partition(likely, len(likely) - top_k)[len(likely) - top_k])


def _top_p_floor(weights: NDArray[np.float32], top_p: float) -> float:
    """The smallest weight in the top-p set, looked for among the likely ones first."""
    if top_p == 1:
        return 0.0
    wanted = top_p * weights.sum(dtype=np.float64)
    for reach in _REACH:
        likely = weights[weights >= math.exp(-reach)]
        if likely.sum(dtype=np.float64) >= wanted:
            likely = np.sort(likely)[::-1]
            sums = np.cumsum(likely, dtype=np.float64)
            return float(likely[min(int(np.searchsorted(sums, wanted)), len(likely) - 1)])
    return 0.0
