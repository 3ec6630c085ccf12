"""What every cache of ours is to transformers: a `Cache` that belongs to one model and sees its forward passes.

The only file that knows transformers' cache API, which changes with every minor release; the supported range is in
`pyproject.toml`. Knows how a forward pass of a model begins and ends (two hooks on the base model, which act only when
this very cache is passed), which layers of a model are its own, and what a model caches. Does not know what is kept.
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, NoReturn

import headwater.cache.versions  # noqa: F401  first: other releases lack what is imported below

# isort: split
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DummyLayer,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from headwater.cache.bank import Shape
from headwater.cache.host import Copies
from headwater.cache.probe import identify, probe_inputs, read_rope
from headwater.cache.saved import State, layers_state, load_layers
from headwater.errors import CacheStateError, UnsupportedCall, UnsupportedModel, UsageError


class OurLayer(CacheLayerMixin):
    """One full-attention layer of a cache of ours; what it holds is the cache's business."""

    is_sliding = False
    is_croppable = False
    is_compileable = False
    supports_early_init = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass  # the cache makes its buffers when a step begins

    def get_max_length(self) -> int:
        return -1

    def offload(self) -> NoReturn:
        raise UnsupportedCall("a WindowCache is small and stays on the model's device; do not offload it")

    def prefetch(self) -> NoReturn:
        self.offload()


class Passing(Cache):
    """A cache for one forward pass, whose layers hold nothing."""


class HostedCache(Cache):
    """A cache that belongs to a model: layers with a sliding window of their own keep the model's cache layer."""

    def __init__(self, model: PreTrainedModel, layers: list[Any]) -> None:
        super().__init__(layers=layers)
        self._config = model.config
        self._attach(base_model(model))

    @property
    @abstractmethod
    def seen(self) -> int:
        """Tokens ever fed, a row."""

    @abstractmethod
    def _begin(self, base: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """A forward pass begins: what it shall be called with. Raises when it cannot work."""

    @abstractmethod
    def _commit(self) -> None:
        """The forward pass is over."""

    def _end(self) -> None:
        """It is over, or has failed."""

    @property
    def _stock(self) -> list[tuple[int, Any]]:
        """The layers that are the model's own."""
        return [(index, layer) for index, layer in enumerate(self.layers) if not isinstance(layer, OurLayer)]

    @property
    def _stock_bytes(self) -> int:
        return sum(t.untyped_storage().nbytes() for _, layer in self._stock for t in _tensors(layer))

    def _check_layers(self) -> None:
        for index, layer in self._stock:
            if isinstance(layer, DynamicSlidingWindowLayer) and layer.get_seq_length() != self.seen:
                raise CacheStateError(
                    f"layer {index} has seen {layer.get_seq_length()} tokens and the cache {self.seen}: an earlier "
                    f"forward pass failed half way; reset() the cache"
                )

    # What transformers asks.

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def activate_past_recording(self) -> NoReturn:
        raise UnsupportedCall(
            "assisted and prompt-lookup decoding take tokens back after they were evicted; generate without an "
            "assistant_model and without prompt_lookup_num_tokens, or use a DynamicCache"
        )

    @abstractmethod
    def rollback(self, count: int) -> None:
        """Take back the newest `count` tokens, exactly."""

    def crop(self, tokens_to_remove: int) -> None:
        """Take back tokens, given as a negative number as transformers does."""
        if tokens_to_remove > 0:
            raise UsageError(f"crop takes a negative number of tokens to remove, got {tokens_to_remove}")
        self.rollback(-tokens_to_remove)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise UnsupportedCall("a WindowCache is tied to its model and cannot be copied; make a new one")

    # A forward pass.

    def _attach(self, base: nn.Module) -> None:
        me, place = weakref.ref(self), _place(base)

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            cache, given = me(), kwargs.get("cache", kwargs.get("past_key_values"))
            if cache is not None and isinstance(given, PagedAttentionCache):
                raise UnsupportedCall(
                    "continuous batching brings its own paged cache and cannot use a WindowCache; generate without "
                    "cache_implementation='paged', or delete the WindowCache of this model first"
                )
            if cache is None or given is not cache:
                return None
            if (now := _place(module)) != place:
                raise CacheStateError(
                    f"the cache was made for a model in {place[0]} on {place[1]} and was given one in {now[0]} on "
                    f"{now[1]}; make a new cache after moving the model"
                )
            return cache._begin(module, args, kwargs)

        def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            cache = me()
            if cache is not None and kwargs.get("cache", kwargs.get("past_key_values")) is cache:
                try:
                    if output is not None:
                        cache._commit()
                finally:
                    cache._end()

        for handle in (
            base.register_forward_pre_hook(before, with_kwargs=True),
            base.register_forward_hook(after, with_kwargs=True, always_call=True),
        ):
            weakref.finalize(self, handle.remove)


def stock_cache(model: PreTrainedModel) -> DynamicCache:
    """The model's own cache, which never evicts."""
    return DynamicCache(config=model.config)


def stock_bytes(cache: Cache) -> int:
    """Physical bytes of a stock cache."""
    return sum(t.untyped_storage().nbytes() for layer in cache.layers for t in _tensors(layer))


def stock_state(cache: Cache, copies: Copies) -> State:
    """The layers that are the model's own. Raises UnsupportedCall when one has a state that is no K and V."""
    layers = _stock_layers(cache)
    for index, layer in layers:
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise UnsupportedCall(f"layer {index} is a {type(layer).__name__}, whose state cannot be saved")
        if (seen := layer.get_seq_length()) != cache.get_seq_length():
            raise CacheStateError(
                f"layer {index} has seen {seen} tokens of {cache.get_seq_length()}: a forward pass failed half way; "
                f"what it left cannot be saved"
            )
    return layers_state(layers, copies)


def load_stock(cache: Cache, state: State) -> None:
    """Fill the layers of a fresh cache that are the model's own."""
    load_layers(_stock_layers(cache), state)


def _stock_layers(cache: Cache) -> list[tuple[int, Any]]:
    """The layers that keep something of their own."""
    return [(i, layer) for i, layer in enumerate(cache.layers) if not isinstance(layer, OurLayer | DummyLayer)]


def full_layers(model: PreTrainedModel, stock: list[Any]) -> list[int]:
    """The layers that grow without end. Raises UnsupportedModel where there are none."""
    own = [index for index, layer in enumerate(stock) if type(layer) is DynamicLayer]
    if not own:
        raise UnsupportedModel(
            f"{type(model).__name__} has no full-attention layers (all have a sliding window or a state of their "
            f"own), so there is nothing for a WindowCache to bound"
        )
    return own


def is_sliding(layer: Any) -> bool:
    """Whether it is a layer of the model's own that slides."""
    return isinstance(layer, DynamicSlidingWindowLayer)


def _tensors(layer: Any) -> list[Tensor]:
    return [t for t in (getattr(layer, "keys", None), getattr(layer, "values", None)) if t is not None]


def grows_or_slides(layer: Any) -> bool:
    """Whether it is a layer of the model's own that keeps K and V, all of them or the latest."""
    return type(layer) in (DynamicLayer, DynamicSlidingWindowLayer)


def croppable(layer: Any) -> bool:
    """Whether a layer of the model's own can take tokens back now."""
    if isinstance(layer, DynamicSlidingWindowLayer):
        return layer.get_seq_length() < layer.sliding_window
    return bool(getattr(layer, "is_croppable", True))


def base_model(model: PreTrainedModel) -> nn.Module:
    """The decoder under a model's head. Raises UnsupportedModel for what is no decoder of transformers."""
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModel(f"a WindowCache needs a transformers model, got {type(model).__name__}")
    if model.config.is_encoder_decoder:
        raise UnsupportedModel(f"{type(model).__name__} is an encoder-decoder model; only decoders are supported")
    return model.base_model


def _place(base: nn.Module) -> tuple[torch.dtype, torch.device]:
    """In what a model computes, and where, as far as its first weights tell."""
    weights = next(base.parameters())
    return weights.dtype, weights.device


def foreign() -> CacheStateError:
    """What a layer raises when it is used while no forward pass of its cache's model is under way."""
    return CacheStateError("the cache was updated outside of a forward pass of the model it was made for")


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """What each layer of a model caches (None: no keys), and the position that its rotary frequencies hold up to."""

    shapes: tuple[Shape | None, ...]
    rope_limit: int | None


@torch.no_grad()
def examine(model: PreTrainedModel) -> Examined:
    """Run a few tokens and see. Raises UnsupportedModel for a model whose positions cannot be re-indexed."""
    base = base_model(model)
    rope = read_rope(base)
    if not rope.frequencies:
        raise UnsupportedModel(
            f"{type(model).__name__} has no rotary embedding that can be read (its positions are learned, or a bias by "
            f"distance, or its own invention), so kept tokens cannot be re-indexed"
        )
    tokens, positions = probe_inputs(model.config.get_text_config(decoder=True).vocab_size, model.device)
    probe = stock_cache(model)
    try:
        base(input_ids=tokens, position_ids=positions, cache=probe, use_cache=True)
    except TypeError as error:
        raise UnsupportedModel(f"{type(model).__name__} cannot be probed at given positions: {error}") from error
    rope = read_rope(base)  # again: a frequency that had drifted was reset by running at small positions
    shapes: list[Shape | None] = []
    for index, layer in enumerate(probe.layers):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        shapes.append(None if keys is None or values is None else identify(index, keys, values, rope))
    return Examined(shapes=tuple(shapes), rope_limit=rope.last_position)
