"""What a model's cache can do in llama.cpp, tried out on a few tokens before a conversation is built on it.

Knows which kinds of model cannot be shifted, and measures the others: keys that are turned and turned back must predict
what they predicted before. Does not know streams. A shift that is not possible would end the process or, worse, be
wrong without a word.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from headwater.engines.llamacpp_cells import QUANTISED, Pool, Seat, Settings
from headwater.engines.llamacpp_model import Model
from headwater.errors import UnsupportedModel, UsageError

_TOKENS = 16
_FAR = 1000
_TIMES = 4
"""Turned forth and back so many times, what a wrong scale does to keys is beyond any rounding."""

_HEAD_MULTIPLE = 64
"""What the size of a head must be a multiple of where its keys are quantised: others end the process in a shift."""

_CELL_MARKS = 12
"""Bytes that each cache of a state has for a token beside K and V: position, count, sequence."""

ALLOWED = {"f32": 0.05, "f16": 0.05, "q8_0": 0.1, "q4_0": 1.0}
"""The most that predictions may differ (KL divergence, nats) by the kind of keys; measured in docs/log.md."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """`cell_bytes` is what a token's K and V take, `fixed_bytes` a recurrent state, whatever it has read. `refusal`
    says why streams of this model cannot evict."""

    cell_bytes: int
    fixed_bytes: int
    refusal: str | None
    divergence: float


def examine(model: Model, settings: Settings) -> Examined:
    """Try it out. Raises UsageError for a kind of keys that this model's heads do not allow."""
    _check_kinds(model, settings)
    pool = Pool(model, replace(settings, n_seq_max=1))
    seat = pool.take(4 * _TOKENS)
    try:
        tokens = _some_tokens(model)
        seat.decode(tokens[: _TOKENS // 2], 0)
        half = len(seat.state())
        seat.decode(tokens[_TOKENS // 2 : _TOKENS], _TOKENS // 2)
        whole = len(seat.state())
        cell_bytes = max(0, (whole - half) // (_TOKENS // 2) - _CELL_MARKS * (2 if model.swa_tokens else 1))
        refusal, divergence = _why_not(model, seat), 0.0
        if refusal is None:
            divergence = _turned(model, seat, tokens[_TOKENS])
            allowed = ALLOWED[settings.type_k]
            if not divergence <= allowed:
                refusal = (
                    f"{model.name} ({model.architecture}) predicts otherwise once its keys were turned and turned "
                    f"back (KL divergence {divergence:.3g}, allowed {allowed} for {settings.type_k} keys)"
                )
        fixed_bytes = 0 if model.forgets else max(0, whole - _TOKENS * cell_bytes)
        return Examined(cell_bytes=cell_bytes, fixed_bytes=fixed_bytes, refusal=refusal, divergence=divergence)
    finally:
        pool.close()


def _check_kinds(model: Model, settings: Settings) -> None:
    key, value = model.head_sizes
    for option, kind, size in (("type_k", settings.type_k, key), ("type_v", settings.type_v, value)):
        if kind in QUANTISED and size % _HEAD_MULTIPLE:
            raise UsageError(
                f"{option} {kind} needs heads of a multiple of {_HEAD_MULTIPLE} numbers, and a head of {model.name} "
                f"has {size}; take {option} f16"
            )


def _why_not(model: Model, seat: Seat) -> str | None:
    if not model.forgets:
        return f"{model.name} ({model.architecture}) keeps what it read in a recurrent state, which forgets nothing"
    if not seat.can_shift:
        return f"llama.cpp cannot move positions of {model.name} ({model.architecture})"
    return None


def _turned(model: Model, seat: Seat, token: int) -> float:
    """How far predictions are from what they were once every key was turned forth and back."""
    before = seat.decode([token], _TOKENS)[0]
    seat.remove(_TOKENS, -1)
    after, start = before, 0
    if model.rotary:
        for _ in range(_TIMES):
            for by in (_FAR, -_FAR):
                seat.shift(start, by)
                start += by
                after = seat.decode([token], start + _TOKENS)[0]
                seat.remove(start + _TOKENS, -1)
    return divergence(before, after)


def divergence(before: NDArray[np.float32], after: NDArray[np.float32]) -> float:
    """The KL divergence of two predictions given as logits, in nats."""
    was, now = (_log_softmax(each) for each in (before, after))
    return float((np.exp(was) * (was - now)).sum())


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    wide = logits.astype(np.float64) - logits.max()
    return wide - np.log(np.exp(wide).sum())


def _some_tokens(model: Model) -> list[int]:
    """Text that any vocabulary has, and ids in order where that is too short."""
    text = "The quick brown fox jumps over the lazy dog, and then it sleeps in the sun until the evening comes."
    ids = model.encode(text, special=False)
    return (ids + [token % model.vocab_size for token in range(_TOKENS + 1)])[: _TOKENS + 1]


def require_eviction(examined: Examined) -> None:
    """Raise UnsupportedModel where streams cannot evict."""
    if examined.refusal is not None:
        raise UnsupportedModel(
            f"{examined.refusal}, so nothing can leave its cache here; take the policy full, or the transformers engine"
        )
