"""The drop-in cache: the ring, dressed as a transformers `Cache`.

The only file that knows transformers' cache API, which changes with every minor release; the supported range is in
`pyproject.toml`. Knows how a forward pass of a model begins and ends (two hooks on the base model, which act only when
this very cache is passed), what the masks must be told, and which calls cannot work.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import headwater.cache.versions  # noqa: F401  first: other releases lack what is imported below

# isort: split
import numpy as np
import torch
from numpy.typing import NDArray
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

from headwater.cache.bank import Shape, cosines
from headwater.cache.call import Call, read_call
from headwater.cache.host import Copies
from headwater.cache.probe import identify, probe_inputs, read_rope
from headwater.cache.ring import Ring
from headwater.cache.saved import State, layers_state, load_layers, load_ring, ring_state
from headwater.errors import BudgetError, CacheStateError, UnsupportedCall, UnsupportedModel, UsageError
from headwater.policies.window import Window
from headwater.rotary import rotate

LONGEST_FRAME = 16_384
"""Positions handed to the model stay below this when they can: there float32 angles are still exact to 1e-3."""


class RingLayer(CacheLayerMixin):
    """One full-attention layer of a WindowCache: hands everything on to the ring."""

    is_sliding = False
    is_croppable = False
    is_compileable = False
    supports_early_init = False

    def __init__(self, ring: Ring, index: int) -> None:
        self.ring, self.index = ring, index

    @property
    def is_initialized(self) -> bool:
        return bool(self.ring.banks)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass  # the ring makes its buffers when a step begins

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self.ring.update(self.index, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        ledger = self.ring.ledger
        return ledger.held + query_length, ledger.seen - ledger.held

    def get_seq_length(self) -> int:
        return self.ring.ledger.seen

    def get_max_length(self) -> int:
        return -1

    def offload(self) -> NoReturn:
        raise UnsupportedCall("a WindowCache is small and stays on the model's device; do not offload it")

    def prefetch(self) -> NoReturn:
        self.offload()


class WindowCache(Cache):
    """A transformers cache that holds at most `budget` tokens, for a stream of any length.

    The first `pins = max(sinks, pinned)` tokens stay for ever, the rest is the most recent ones. K and V live in
    buffers of `budget + 1` slots a layer, written in place; `nbytes` says their physical size. Layers with a sliding
    window of their own keep it, and use the model's own cache layer.

    budget: the most tokens held after a step, pins included. sinks: attention sinks, the first tokens of the stream
    (G. Xiao et al., arXiv 2309.17453). 0 is a pure sliding window. pinned: length of a prefix that is never evicted,
    e.g. a system prompt. block: how many tokens leave at a time; default a sixteenth of the window, 1 is the rule of
    the papers. reindex: "auto" keeps the pins right before the window in the model's positions; "none" leaves them
    where they were, which breaks once their distance passes about 1.5 times the trained length. examined: what
    `examine(model)` found, for one who makes many caches of a model; left out, the model is examined now.

    The cache belongs to `model`, may be passed to `generate` or to the model again and again, and holds one
    conversation (rows of a batch advance together); `reset()` starts over and gives the memory back. Raises
    BudgetError when the numbers do not fit each other or the model, UnsupportedModel when the model's positions
    cannot be re-indexed. A call that cannot work raises UnsupportedCall or CacheStateError before anything runs.

    Under `generate`, pass the full history at every turn, as transformers asks: it feeds what is new. New ids alone are
    refused, unless there are more of them than the cache has seen, which nobody can tell from a history.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        budget: int,
        sinks: int = 4,
        pinned: int = 0,
        block: int | None = None,
        reindex: str = "auto",
        *,
        examined: Examined | None = None,
    ) -> None:
        for name, value in (("sinks", sinks), ("pinned", pinned)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise BudgetError(f"{name} must be an integer of at least 0, got {value!r}")
        if reindex not in ("auto", "none"):
            raise UsageError(f"reindex must be 'auto' or 'none', got {reindex!r}")
        window = Window.of(budget, max(sinks, pinned), block)
        base = _base_model(model)
        found = examine(model) if examined is None else examined
        stock, shapes, rope_limit = list(stock_cache(model).layers), found.shapes, found.rope_limit
        own = [index for index, layer in enumerate(stock) if type(layer) is DynamicLayer]
        if not own:
            raise UnsupportedModel(
                f"{type(model).__name__} has no full-attention layers (all have a sliding window or a state of their "
                f"own), so there is nothing for a WindowCache to bound"
            )
        self.window = window
        self.ring = Ring(window, [cast(Shape, shapes[index]) for index in own], reindex=reindex == "auto")
        layers: list[Any] = list(stock)
        for place, index in enumerate(own):
            layers[index] = RingLayer(self.ring, place)
        super().__init__(layers=layers)
        self._turning = [
            (layer, shapes[i]) for i, layer in enumerate(layers) if isinstance(layer, DynamicSlidingWindowLayer)
        ]
        self._pure = len(own) == len(layers)
        self._config = model.config
        self._rope_limit = rope_limit
        self._rebase_at = self._frame(rope_limit)
        self.stepwise = False
        """Whether a chunk that crosses evictions is attended as if fed token by token (see `exact_chunk`). Off under
        `generate`, where a prompt attends to itself as the model's own forward pass gives it."""
        self._attach(base)

    # What is held.

    @property
    def seen(self) -> int:
        """Tokens ever fed, a row."""
        return self.ring.ledger.seen

    @property
    def held(self) -> int:
        """Tokens held now, a row; never more than the budget between two forward passes."""
        return self.ring.ledger.held

    @property
    def kept(self) -> NDArray[np.int64]:
        """Positions held, ascending, `[held]`."""
        return self.ring.ledger.kept

    @property
    def nbytes(self) -> int:
        """Physical bytes of all layers' buffers, the model's own sliding layers included."""
        stock = (t for layer in self.layers if not isinstance(layer, RingLayer) for t in _tensors(layer))
        return self.ring.nbytes + sum(t.untyped_storage().nbytes() for t in stock)

    def reset(self) -> None:
        """Forget the conversation and give the memory back."""
        self.ring.reset()
        for layer in self.layers:
            if not isinstance(layer, RingLayer):
                layer.reset()

    def evict(self, count: int) -> tuple[int, int]:
        """Drop the `count` oldest unpinned tokens now; return the positions `[start, stop)` that went."""
        self._refuse_open_step()
        start = self.window.pins + self.ring.ledger.gone
        self.ring.evict(count)
        return start, start + count

    def rollback(self, count: int) -> None:
        """Take back the newest `count` tokens, exactly.

        Raises CacheStateError when they caused an eviction, UnsupportedCall when a layer of the model's own cannot.
        """
        self._refuse_open_step()
        own = [layer for layer in self.layers if not isinstance(layer, RingLayer)]
        stuck = [layer for layer in own if not _croppable(layer)]
        if count and stuck:
            raise UnsupportedCall(f"a layer of the model's own ({stuck[0]!r}) cannot take tokens back once it has slid")
        self.ring.rollback(count)
        for layer in own:
            cast(DynamicLayer, layer).crop(-count)

    def skip(self, positions: int) -> None:
        """Move the stream's positions on, as if that many tokens had passed through the window: an experiment's
        tool."""
        if not self._pure:
            raise UnsupportedCall("positions cannot be skipped in a model with sliding layers of its own")
        self._refuse_open_step()
        self.ring.skip(positions)

    def state(self, copies: Copies) -> State:
        """All that the next step would use, copied. Raises UnsupportedCall for a model with layers of another kind."""
        self._refuse_open_step()
        return ring_state(self.ring, copies) | stock_state(self, copies)

    def load(self, state: State) -> None:
        """Make this fresh cache what another one was. Raises SnapshotError when that does not fit."""
        load_ring(self.ring, state)
        load_stock(self, state)

    def exact_chunk(self, count: int) -> int:
        """How many of the next `count` tokens can go in one forward pass in which every token sees exactly what it
        would have seen alone (`stepwise`)."""
        if self._rope_limit is not None:  # after a rebase the next position is `held`
            count = min(count, self._rope_limit - self.held)
        return self.ring.exact_chunk(count) if self._can_be_exact else min(count, self.ring.ledger.room)

    @property
    def _can_be_exact(self) -> bool:
        """Whether a mask of our own reaches every layer, and only layers of ours."""
        return self._pure and self._config._attn_implementation in ("sdpa", "eager")

    # What transformers asks.

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.ring.select(indices)
        for layer in self.layers:
            if not isinstance(layer, RingLayer):
                layer.reorder_cache(cast(torch.LongTensor, indices))

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.ring.banks:
            batch = next(iter(self.ring.banks.values())).keys.shape[1]
            self.batch_select_indices(torch.arange(batch).repeat_interleave(repeats))

    def activate_past_recording(self) -> NoReturn:
        raise UnsupportedCall(
            "assisted and prompt-lookup decoding take tokens back after they were evicted; generate without an "
            "assistant_model and without prompt_lookup_num_tokens, or use a DynamicCache"
        )

    def crop(self, tokens_to_remove: int) -> None:
        """Take back tokens, given as a negative number as transformers does."""
        if tokens_to_remove > 0:
            raise UsageError(f"crop takes a negative number of tokens to remove, got {tokens_to_remove}")
        self.rollback(-tokens_to_remove)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise UnsupportedCall("a WindowCache is tied to its model and cannot be copied; make a new one")

    # A forward pass.

    def _attach(self, base: nn.Module) -> None:
        me = weakref.ref(self)

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            cache, given = me(), kwargs.get("cache", kwargs.get("past_key_values"))
            if cache is not None and isinstance(given, PagedAttentionCache):
                raise UnsupportedCall(
                    "continuous batching brings its own paged cache and cannot use a WindowCache; generate without "
                    "cache_implementation='paged', or delete the WindowCache of this model first"
                )
            if cache is None or given is not cache:
                return None
            return cache._begin(module, args, kwargs)

        def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            cache = me()
            if cache is not None and kwargs.get("cache", kwargs.get("past_key_values")) is cache:
                cache.ring.commit()

        for handle in (
            base.register_forward_pre_hook(before, with_kwargs=True),
            base.register_forward_hook(after, with_kwargs=True),
        ):
            weakref.finalize(self, handle.remove)

    def _begin(self, base: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        self.ring.step = None
        self._check_layers()
        call = read_call(args, kwargs, seen=self.seen)
        if torch.is_grad_enabled() and any(p.requires_grad for p in base.parameters()):
            raise UnsupportedCall("a WindowCache is for inference; call the model under torch.inference_mode()")
        self._make_frame(call.count)
        step = self.ring.begin(call.count, call.batch, exact=self.stepwise and self._can_be_exact)
        kwargs = dict(kwargs)
        if self.ring.base or call.positions is None:
            start = self.ring.next_position
            kwargs["position_ids"] = torch.arange(start, start + call.count, device=call.device)[None]
        if step.exact:
            kwargs["attention_mask"] = self._exact_mask(call)
        return args, kwargs

    def _exact_mask(self, call: Call) -> Tensor:
        step = self.ring.step
        if step is None:
            raise CacheStateError("no step is open")
        visible = self.ring.visible(step, call.device)
        if self._config._attn_implementation == "eager":
            dtype = next(iter(self.ring.banks)).dtype
            return torch.zeros(visible.shape, dtype=dtype, device=call.device).masked_fill_(
                ~visible, torch.finfo(dtype).min
            )
        return visible

    def _check_layers(self) -> None:
        for index, layer in enumerate(self.layers):
            if isinstance(layer, DynamicSlidingWindowLayer) and layer.get_seq_length() != self.seen:
                raise CacheStateError(
                    f"layer {index} has seen {layer.get_seq_length()} tokens and the cache {self.seen}: an earlier "
                    f"forward pass failed half way; reset() the cache"
                )

    def _refuse_open_step(self) -> None:
        if self.ring.step is not None:
            raise CacheStateError("the last forward pass did not end; run the next one before changing the cache")

    # The frame of positions.

    def _frame(self, rope_limit: int | None) -> int:
        """The position, in the model's frame, that no token shall reach."""
        slid = [layer.sliding_window for layer, _ in self._turning]
        life = max([self.window.recent + self.window.block, *slid])
        least = self.window.budget + 1 + life
        trained = getattr(self._config.get_text_config(decoder=True), "max_position_embeddings", None)
        if rope_limit is not None:
            if least > rope_limit:
                raise BudgetError(
                    f"budget {self.window.budget} is too large for this model: its rotary frequencies change at "
                    f"position {rope_limit}, and two windows must fit below ({least} positions); lower the budget"
                )
            return rope_limit
        if trained is not None and self.window.budget >= trained:
            raise BudgetError(
                f"a budget of {self.window.budget} tokens needs one position more, and the model's trained length is "
                f"{trained}; lower the budget to {trained - 1}"
            )
        return max(least, min(trained or LONGEST_FRAME, LONGEST_FRAME))

    def _make_frame(self, count: int) -> None:
        """Rebase when the next tokens would pass the frame's end."""
        if self.ring.next_position + count > self._rebase_at:
            down = self.ring.rebase()
            for layer, shape in self._turning if down else ():
                keys = layer.keys
                if keys is not None and shape is not None and shape.rotation is not None:
                    cos, sin = cosines(shape.rotation, -down, keys.device)
                    layer.keys = rotate(keys.float(), cos, sin, shape.rotation).to(keys.dtype)
        if self._rope_limit is not None and self.ring.next_position + count > self._rope_limit:
            raise UnsupportedCall(
                f"{count} tokens in one forward pass would reach position {self.ring.next_position + count}, and this "
                f"model's rotary frequencies change at {self._rope_limit}; feed them in pieces (generate's "
                f"prefill_chunk_size)"
            )


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
    return [(i, layer) for i, layer in enumerate(cache.layers) if not isinstance(layer, RingLayer | DummyLayer)]


def _tensors(layer: Any) -> list[Tensor]:
    return [t for t in (getattr(layer, "keys", None), getattr(layer, "values", None)) if t is not None]


def _croppable(layer: Any) -> bool:
    if isinstance(layer, DynamicSlidingWindowLayer):
        return layer.get_seq_length() < layer.sliding_window
    return bool(getattr(layer, "is_croppable", True))


def _base_model(model: PreTrainedModel) -> nn.Module:
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModel(f"a WindowCache needs a transformers model, got {type(model).__name__}")
    if model.config.is_encoder_decoder:
        raise UnsupportedModel(f"{type(model).__name__} is an encoder-decoder model; only decoders are supported")
    return model.base_model


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """What each layer of a model caches (None: no keys), and the position that its rotary frequencies hold up to."""

    shapes: tuple[Shape | None, ...]
    rope_limit: int | None


@torch.no_grad()
def examine(model: PreTrainedModel) -> Examined:
    """Run a few tokens and see. Raises UnsupportedModel for a model whose positions cannot be re-indexed."""
    base = _base_model(model)
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
