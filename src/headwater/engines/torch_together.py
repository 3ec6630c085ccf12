"""One token of several torch streams at a time, where the model allows it.

Knows which streams share a forward pass, and proves on the model itself that a row of one is what it is alone. Does not
know how rows are kept apart (`cache.together`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headwater.cache.hosted import stock_cache
from headwater.cache.together import Row, stackable, step_together
from headwater.engines.base import Stream, check_distinct, fed_one
from headwater.engines.torch_streams import StockRow, TorchStream
from headwater.errors import HeadwaterError

PROOF = (3, 5, 4)
"""How many tokens the rows of the proof hold before their step."""

NOISE = {torch.float32: 1e-3, torch.float64: 1e-6}
"""How far off a logit may be, relative to the largest, where sums are taken in another order; elsewhere `COARSE`."""
COARSE = 0.1


class Together:
    """Steps of the streams of one model."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._proved: dict[tuple[Any, ...], str | None] = {}

    @property
    def refusal(self) -> str | None:
        """Why rows cannot share a forward pass, or None; found out once, and again when the model was moved."""
        model = self._model
        place = (model.dtype, model.device, model.config.get_text_config(decoder=True)._attn_implementation)
        if place not in self._proved:
            try:
                self._proved[place] = _disproof(model)
            except Exception as error:  # whatever a model does with rows that differ, alone it works
                reason = str(error) if isinstance(error, HeadwaterError) else f"{type(error).__name__}: {error}"
                self._proved[place] = reason
        return self._proved[place]

    def feed(self, streams: Sequence[Stream], tokens: Sequence[int]) -> list[NDArray[np.float32] | Exception]:
        """As `Engine.feed_together`."""
        check_distinct(streams)
        came: dict[int, NDArray[np.float32] | Exception] = {}
        sharing: dict[int, tuple[TorchStream, Row]] = {}
        for index, (stream, token) in enumerate(zip(streams, tokens, strict=True)):
            try:
                row = stream.row(token) if isinstance(stream, TorchStream) else None
            except Exception as error:
                came[index] = error
                continue
            if isinstance(stream, TorchStream) and row is not None:
                sharing[index] = stream, row
        if len(sharing) > 1 and self.refusal is None:
            left = step_together(
                self._model, [row for _, row in sharing.values()], [tokens[index] for index in sharing]
            )
            for (index, (stream, _)), logits in zip(sharing.items(), left, strict=True):
                came[index] = stream.predicted(logits) if isinstance(logits, Tensor) else logits
        return [came[i] if i in came else fed_one(streams[i], tokens[i]) for i in range(len(streams))]


@torch.inference_mode()
def _disproof(model: Any) -> str | None:
    """Step rows of different lengths together, and each of them alone; why they must not, or None."""
    rows, twins = ([stock_cache(model) for _ in PROOF] for _ in range(2))
    if not stackable(StockRow(rows[0])):
        return "a layer keeps a state that is no K and V"
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    alone: list[Tensor] = []
    last: list[int] = []
    for number, (count, row, twin) in enumerate(zip(PROOF, rows, twins, strict=True)):
        text = (11 * number + torch.arange(count + 1, device=model.device)) % vocabulary
        for cache in (row, twin):
            model(input_ids=text[None, :-1], cache=cache, use_cache=True, logits_to_keep=1)
        after = model(input_ids=text[None, -1:], cache=twin, use_cache=True, logits_to_keep=1).logits
        alone.append(after[0, -1].float())
        last.append(int(text[-1]))
    for number, (left, right) in enumerate(
        zip(step_together(model, [StockRow(row) for row in rows], last), alone, strict=True)
    ):
        if isinstance(left, Exception):
            raise left
        off = float((left - right).abs().max() / right.abs().max())
        if not off <= NOISE.get(model.dtype, COARSE):
            return f"row {number} of {len(PROOF)} that were computed together was off by {off:.0e} of its largest logit"
    return None
