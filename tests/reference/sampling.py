"""The slow twin of `headwater.chat.sampling`.

Twin: one Python loop per knob over (id, logit) pairs, every probability normalised anew, everything sorted.
Fast path: arrays of weights relative to the largest, thresholds found among the likely tokens, nothing normalised.
Verified by hand on the tables in `tests/chat/test_sampling.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from headwater.chat.sampling import Sampling


def distribution(logits: Sequence[float], context: Iterable[int], sampling: Sampling) -> dict[int, float]:
    """Probability of every token that may be drawn."""
    scores = {token: float(logit) for token, logit in enumerate(logits)}
    for token in set(context):
        penalty = sampling.repetition_penalty
        scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
    if sampling.temperature == 0:
        best = max(scores.values())
        return {min(token for token, score in scores.items() if score == best): 1.0}
    scores = {token: score / sampling.temperature for token, score in scores.items()}
    if sampling.top_k:
        least = sorted(scores.values(), reverse=True)[: sampling.top_k][-1]
        scores = {token: score for token, score in scores.items() if score >= least}
    probabilities = _softmax(scores)
    if sampling.top_p < 1:
        total, least = 0.0, 0.0
        for probability in sorted(probabilities.values(), reverse=True):
            total, least = total + probability, probability
            if total >= sampling.top_p:
                break
        probabilities = _normal({t: p for t, p in probabilities.items() if p >= least})
    floor = sampling.min_p * max(probabilities.values())
    return _normal({token: p for token, p in probabilities.items() if p >= floor})


def draw(logits: Sequence[float], context: Iterable[int], sampling: Sampling, uniform: float) -> int:
    """The token at `uniform` of the distribution, by ascending id."""
    total = 0.0
    chosen = distribution(logits, context, sampling)
    for token in sorted(chosen):
        total += chosen[token]
        if uniform < total:
            return token
    return max(chosen)


def _softmax(scores: dict[int, float]) -> dict[int, float]:
    top = max(scores.values())
    return _normal({token: math.exp(score - top) for token, score in scores.items()})


def _normal(weights: dict[int, float]) -> dict[int, float]:
    total = sum(weights.values())
    return {token: weight / total for token, weight in weights.items()}
