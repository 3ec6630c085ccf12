"""Attention weights of a transformers model, taken inside its forward pass, block by block over its own growing cache.

Knows how softmax attention is computed (scale, softcap, mask, learned sinks) in models that go through transformers'
attention interface: there one function computes the weights once, hands them out and uses them for the output. Models
that compute attention by themselves hand out what they return under `output_attentions`. Does not know families by
name: a short run through each way, against the model as it is, says which layers pay attention and whether they are
computed rightly.

A model is changed only while a forward pass runs here (the name of its attention implementation, put back after it);
where the weights go is known to this thread alone, so another run of the same model sees neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextvars import ContextVar
from itertools import accumulate
from threading import Lock
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from headwater.cache.attention import attended, attention_weights
from headwater.cache.hosted import stock_cache
from headwater.engines.base import AttentionBlock
from headwater.engines.request import AttentionRequest
from headwater.errors import UnsupportedCall

NAME = "headwater_watched"
"""What transformers knows our attention function by, once one was needed."""

PLAIN_CHUNK = 512
"""The most tokens in a forward pass that is not watched."""

PROBE = (9, 1, 4)
"""Tokens of the forward passes that prove the function: the first, a single one and several at once."""

Sink = Callable[[int, Float[Tensor, "heads tokens keys"]], None]
"""Takes the weights of a layer, by its number."""

Way = Callable[..., Any]
"""Runs a forward pass of a model and shows its weights to a sink: `way(model, sink, **arguments of the model)`."""

Weights = np.ndarray[Any, np.dtype[np.floating[Any]]]

_switched = Lock()
"""Held while a model's implementation is switched: of two threads that watch one model, the second would take the
switched name for the model's own, and put that back."""

_sink: ContextVar[Sink | None] = ContextVar("headwater_attention_sink", default=None)


def watched_attention(
    module: Any,
    query: Float[Tensor, "batch heads tokens dim"],
    key: Float[Tensor, "batch kv_heads keys dim"],
    value: Float[Tensor, "batch kv_heads keys value_dim"],
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Float[Tensor, " heads"] | None = None,
    **others: Any,
) -> tuple[Float[Tensor, "batch tokens heads value_dim"], None]:
    """An attention function of transformers that computes the weights in full and shows them to this thread's sink."""
    weights = attention_weights(query, key, scaling=scaling, softcap=softcap, sinks=s_aux, mask=attention_mask)
    if (sink := _sink.get()) is not None:
        sink(module.layer_idx, weights[0])
    return attended(weights, value).transpose(1, 2).contiguous(), None


def _through_the_interface(model: Any, sink: Sink, **call: Any) -> Any:
    """A forward pass in which the model's attention is computed here and shown to the sink."""
    config = model.config.get_text_config(decoder=True)
    if NAME not in ALL_ATTENTION_FUNCTIONS.valid_keys():
        ALL_ATTENTION_FUNCTIONS.register(NAME, watched_attention)
        ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, eager_mask)
    with _switched:
        before, token = config._attn_implementation, _sink.set(sink)
        config._attn_implementation = NAME
        try:
            return model(**call)
        finally:
            config._attn_implementation = before
            _sink.reset(token)


def _as_returned(model: Any, sink: Sink, **call: Any) -> Any:
    """A forward pass of a model that computes attention by itself and returns the weights of all layers."""
    output = model(output_attentions=True, **call)
    returned = getattr(output, "attentions", None) or ()
    if len(returned) == model.config.get_text_config(decoder=True).num_hidden_layers:  # or nobody knows whose they are
        for layer, weights in enumerate(returned):
            sink(layer, weights[0])
    return output


def _unwatched(model: Any, sink: Sink | None, **call: Any) -> Any:
    return model(**call)


class Watcher:
    """What lets a model's attention be seen. Raises UnsupportedCall for a model that shows none."""

    def __init__(self, model: Any, name: str) -> None:
        self._model, self._name = model, name
        self._way, self.layers, self.heads = self._examine()

    def blocks(self, request: AttentionRequest) -> Iterator[AttentionBlock]:
        """The weights that were asked for."""
        cache: Any = stock_cache(self._model)
        for first in range(0, request.start, PLAIN_CHUNK):
            self._forward(_unwatched, request.tokens[first : min(first + PLAIN_CHUNK, request.start)], cache)
        for block in request.blocks():
            yield self._block(request, block, cache)  # and not held here while the next one is computed

    def _block(self, request: AttentionRequest, block: range, cache: Any) -> AttentionBlock:
        weights = np.empty((len(request.layers), len(request.heads), len(block), block.stop), request.dtype)
        taken = _Taken(request, weights)
        self._forward(self._way, request.tokens[block.start : block.stop], cache, taken.take)
        taken.check()
        return AttentionBlock(first=block.start, weights=weights)

    @torch.inference_mode()
    def _forward(self, way: Way, tokens: tuple[int, ...], cache: Any, sink: Sink | None = None) -> Tensor:
        """The logits after the last of these tokens."""
        ids = torch.tensor([tokens], device=self._model.device)
        output = way(self._model, sink, input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1)
        return output.logits[0, -1]

    def _examine(self) -> tuple[Way, tuple[int, ...], int]:
        """A way that works, the layers that show their weights, and the heads of each."""
        plain, _ = self._probe(_unwatched)
        for way in (_through_the_interface, _as_returned):
            logits, heads = self._probe(way)
            if not heads or not self._agree(plain, logits):
                continue
            if len(set(heads.values())) > 1:
                raise UnsupportedCall(f"the layers of {self._name} differ in how many heads they have: {heads}")
            return way, tuple(sorted(heads)), next(iter(heads.values()))
        raise UnsupportedCall(
            f"{self._name} ({type(self._model).__name__}) does not show its attention: it neither computes it through "
            f"transformers' attention interface nor returns it under output_attentions"
        )

    def _probe(self, way: Way) -> tuple[Tensor, dict[int, int]]:
        """The logits after each forward pass of a short run, and the heads of each layer that showed its weights."""
        heads: dict[int, int] = {}

        def count(layer: int, weights: Tensor) -> None:
            heads[layer] = weights.shape[0]

        cache: Any = stock_cache(self._model)
        vocabulary = self._model.config.get_text_config(decoder=True).vocab_size
        tokens = tuple(index * 7919 % vocabulary for index in range(1, sum(PROBE) + 1))
        stops = list(accumulate(PROBE))
        pieces = [tokens[stop - length : stop] for stop, length in zip(stops, PROBE, strict=True)]
        return torch.stack([self._forward(way, piece, cache, count) for piece in pieces]).double(), heads

    def _agree(self, plain: Tensor, logits: Tensor) -> bool:
        allowed = max(1e-4, 8 * torch.finfo(self._model.dtype).eps)
        return bool((plain - logits).norm() <= allowed * plain.norm())


class _Taken:
    """The weights of one block, as its layers hand them over."""

    def __init__(self, request: AttentionRequest, weights: Weights) -> None:
        self._target = torch.from_numpy(weights)
        self._places = {layer: place for place, layer in enumerate(request.layers)}
        self._heads = list(request.heads)

    def take(self, layer: int, weights: Float[Tensor, "heads tokens keys"]) -> None:
        """A layer's weights over the positions it still holds: a sliding layer has let the oldest go."""
        if (place := self._places.pop(layer, None)) is None:
            return
        whole = self._heads == list(range(weights.shape[0]))
        gone = self._target.shape[-1] - weights.shape[-1]
        self._target[place, ..., :gone] = 0
        self._target[place, ..., gone:].copy_(weights if whole else weights[self._heads])

    def check(self) -> None:
        """Raises UnsupportedCall unless every layer has handed over its part."""
        if self._places:
            raise UnsupportedCall(f"layers {sorted(self._places)} did not show their attention in this forward pass")
