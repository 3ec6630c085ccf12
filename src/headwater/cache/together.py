"""One token of several streams in one forward pass: the weights are read once, and every row keeps to its own cache.

Knows how rows that hold different things, at different positions, go through a model side by side: everything but
attention is computed for all of them at once, and each attends over its own K and V. Does not know what a row's cache
keeps, and asks it nothing but to begin a step and to end it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import headwater.cache.versions  # noqa: F401  first: other releases lack what is imported below

# isort: split
import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from headwater.cache.attending import attending
from headwater.cache.attention import attended, attention_weights
from headwater.cache.hosted import OurLayer, Passing, grows_or_slides
from headwater.cache.policy_cache import attach
from headwater.errors import UnsupportedModel


class Row(Protocol):
    """The cache of one stream; `layers` take K and V of its tokens in and return all that they attend to."""

    @property
    def layers(self) -> list[Any]: ...

    def begin_one(self) -> int:
        """A step of one token begins; its position, as the model counts. Raises when it cannot work."""
        ...

    def end_one(self) -> None:
        """The step is over."""
        ...


class NewOnly(OurLayer):
    """A layer that hands on what it is given: attention takes it in."""

    is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0


class Rows:
    """The layers of all rows. `failed` holds, by row, what went wrong in one: the others do without it."""

    def __init__(self, layers: Sequence[Sequence[Any]]) -> None:
        self.layers, self.failed = layers, dict[int, Exception]()

    def attend(
        self,
        index: int,
        query: Float[Tensor, "batch heads tokens dim"],
        keys: Shaped[Tensor, "batch kv_heads tokens dim"],
        values: Shaped[Tensor, "batch kv_heads tokens value_dim"],
        **how: Any,
    ) -> Float[Tensor, "batch tokens heads value_dim"]:
        """Let every row take its token of a layer in and attend to all that it holds."""
        out = query.new_empty(query.shape[0], 1, query.shape[1], values.shape[-1])
        for row, layer in enumerate(self.layers[index]):
            part = slice(row, row + 1)
            if row in self.failed:
                continue
            try:
                held_keys, held_values = layer.update(keys[part], values[part])
                out[part] = attend_one(query[part], held_keys, held_values, **how)
            except Exception as error:
                self.failed[row] = error
                out[part] = 0
        return out


def attend_one(
    query: Float[Tensor, "1 heads 1 dim"],
    keys: Shaped[Tensor, "1 kv_heads slots dim"],
    values: Shaped[Tensor, "1 kv_heads slots value_dim"],
    *,
    scaling: float | None,
    softcap: float | None,
    sinks: Float[Tensor, " heads"] | None,
) -> Float[Tensor, "1 1 heads value_dim"]:
    """One token over all that is held. The query heads of a group stand side by side as if they were tokens, so that no
    key is repeated for them."""
    if softcap is not None or sinks is not None:
        weights = attention_weights(query, keys, scaling=scaling, softcap=softcap, sinks=sinks)
        return attended(weights, values).transpose(1, 2)
    grouped = query.view(1, keys.shape[1], -1, query.shape[-1])
    out = torch.nn.functional.scaled_dot_product_attention(grouped, keys, values, scale=scaling)
    return out.reshape(1, 1, query.shape[1], values.shape[-1])


class _Call:
    """One forward pass of several rows."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = Rows(list(zip(*(row.layers for row in rows), strict=True)))
        self.reached = set[int]()
        self.group_of: Mapping[int, Rows] = dict.fromkeys(range(len(self.rows.layers)), self.rows)
        self.cache = Passing([NewOnly() for _ in self.group_of])

    def run(self, model: Any, tokens: Sequence[int], positions: Sequence[int]) -> Tensor:
        with attach(model), attending(self):
            out = model(
                input_ids=torch.tensor(tokens, device=model.device)[:, None],
                position_ids=torch.tensor(positions, device=model.device)[:, None],
                cache=self.cache,
                use_cache=True,
                logits_to_keep=1,
            )
        if missing := sorted(set(self.group_of) - self.reached):
            raise UnsupportedModel(f"layers {missing} compute attention by themselves, so rows cannot be kept apart")
        return out.logits[:, -1].float()


def stackable(row: Row) -> bool:
    """Whether every layer of a row's cache takes in K and V and nothing else, so that rows can stand side by side."""
    return all(isinstance(layer, OurLayer) or grows_or_slides(layer) for layer in row.layers)


@torch.inference_mode()
def step_together(model: Any, rows: Sequence[Row], tokens: Sequence[int]) -> list[Tensor | Exception]:
    """Feed a token to every row; the logits after it, `[vocab]` in float32, or why it was not fed.

    A row that fails leaves the others as they would have been without it. When the forward pass itself fails, all rows
    have failed.
    """
    results: dict[int, Tensor | Exception] = {}
    begun: list[int] = []
    positions: list[int] = []
    for index, row in enumerate(rows):
        try:
            positions.append(row.begin_one())
            begun.append(index)
        except Exception as error:
            results[index] = error
    if begun:
        call = _Call([rows[index] for index in begun])
        try:
            logits = call.run(model, [tokens[index] for index in begun], positions)
        except Exception as error:
            return [results.get(index, error) for index in range(len(rows))]
        for place, index in enumerate(begun):
            try:
                if place in call.rows.failed:
                    raise call.rows.failed[place]
                rows[index].end_one()
                results[index] = logits[place].clone()
            except Exception as error:
                results[index] = error
    return [results[index] for index in range(len(rows))]
