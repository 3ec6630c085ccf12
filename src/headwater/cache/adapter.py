"""The drop-in cache: the ring, dressed as a transformers `Cache`.

Knows what the masks must be told, the frame that positions are counted in, and which calls cannot work. Does not know
transformers' cache API beyond what `hosted` makes of it.
"""

from __future__ import annotations

from typing import Any, cast

import headwater.cache.versions  # noqa: F401  first: other releases lack what is imported below

# isort: split
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from headwater.cache.any_ring import AnyRing
from headwater.cache.bank import Shape, cosines
from headwater.cache.call import Call, read_call
from headwater.cache.host import Copies
from headwater.cache.hosted import (
    Examined,
    HostedCache,
    OurLayer,
    croppable,
    examine,
    foreign,
    full_layers,
    is_sliding,
    load_stock,
    stock_cache,
    stock_state,
)
from headwater.cache.policy_cache import PolicyCache
from headwater.cache.quantised_ring import QuantisedRing
from headwater.cache.ring import Ring
from headwater.cache.saved import State, load_ring, ring_state
from headwater.errors import BudgetError, CacheStateError, UnknownName, UnsupportedCall, UsageError
from headwater.policies import POLICIES, Policy
from headwater.policies import policy as make_policy
from headwater.policies.window import Window
from headwater.rotary import rotate

WINDOWED, SINKS = "streaming-llm", 4
"""What a WindowCache is, unless something else is asked for."""

KV_DTYPES: dict[str, type[AnyRing[Any]]] = {"int8": QuantisedRing}
"""What K and V can be kept as under a window, beside what the model makes them."""

LONGEST_FRAME = 16_384
"""Positions handed to the model stay below this when they can: there float32 angles are still exact to 1e-3."""


class RingLayer(OurLayer):
    """One full-attention layer of a WindowCache: hands everything on to the ring."""

    def __init__(self, ring: AnyRing[Any], index: int) -> None:
        self.ring, self.index = ring, index

    @property
    def is_initialized(self) -> bool:
        return bool(self.ring.banks)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self.ring.update(self.index, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if self.ring.step is None:  # said before a layer of the model's own takes the tokens in
            raise foreign()
        ledger = self.ring.ledger
        return ledger.held + query_length, ledger.seen - ledger.held

    def get_seq_length(self) -> int:
        return self.ring.ledger.seen


class WindowCache(HostedCache):
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

    policy: "streaming-llm" (or "sliding-window", without sinks) is the window above. Under any other name, or a policy
    of one's own, every kv-head keeps its own tokens: the object is a PolicyCache, with the sinks and prefix as the
    policy's sinks, tokens leaving one by one, and the model's attention in sight inside `headwater.attach(model)`.
    reduce: how query heads that share a kv-head vote, "mean" or "max". mode: "prompt" lets snapkv and pyramidkv pick
    from the prompt at its end, as in their papers.

    kv_dtype: "int8" keeps K and V as int8 with a float32 scale for every token and kv-head, apart from the pins and the
    newest 8 to 15 tokens (fewer in a small window): about a quarter of float32's bytes, exactly those of
    `QuantisedRing`. A token is quantised once. After `rollback`, tokens that were quantised stay so.

    The cache belongs to `model`, may be passed to `generate` or to the model again and again, and holds one
    conversation (rows of a batch advance together); `reset()` starts over and gives the memory back. Raises
    BudgetError when the numbers do not fit each other or the model, UnsupportedModel when the model's positions
    cannot be re-indexed. A call that cannot work raises UnsupportedCall or CacheStateError before anything runs.

    Under `generate`, pass the full history at every turn, as transformers asks: it feeds what is new. New ids alone are
    refused, unless there are more of them than the cache has seen, which nobody can tell from a history.
    """

    def __new__(cls, model: PreTrainedModel, *given: Any, policy: str | Policy[Any] = WINDOWED, **named: Any) -> Any:
        kind = POLICIES.get(policy) if isinstance(policy, str) else policy
        if kind is not None and kind.windowed:
            return super().__new__(cls)
        return _under_policy(model, policy, *given, **named)

    def __init__(
        self,
        model: PreTrainedModel,
        budget: int | None = None,
        sinks: int | None = None,
        pinned: int = 0,
        block: int | None = None,
        reindex: str = "auto",
        *,
        policy: str | Policy[Any] = WINDOWED,
        reduce: str = "mean",
        mode: str = "decode",
        kv_dtype: str | None = None,
        examined: Examined | None = None,
    ) -> None:
        if reduce != "mean" or mode != "decode":
            raise UsageError("reduce and mode are for policies that look at attention; a window has no use for them")
        budget, sinks = _numbers(policy, budget, sinks)
        for name, value in (("sinks", sinks), ("pinned", pinned)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise BudgetError(f"{name} must be an integer of at least 0, got {value!r}")
        if reindex not in ("auto", "none"):
            raise UsageError(f"reindex must be 'auto' or 'none', got {reindex!r}")
        window = Window.of(budget, max(sinks, pinned), block)
        found = examine(model) if examined is None else examined
        stock, shapes = list(stock_cache(model).layers), found.shapes
        own = full_layers(model, stock)
        self.window = window
        self.ring = ring_kind(kv_dtype)(
            window, [cast(Shape, shapes[index]) for index in own], reindex=reindex == "auto"
        )
        layers: list[Any] = list(stock)
        for place, index in enumerate(own):
            layers[index] = RingLayer(self.ring, place)
        self._turning = [(layer, shapes[index]) for index, layer in enumerate(layers) if is_sliding(layer)]
        self._pure = len(own) == len(layers)
        super().__init__(model, layers)
        self._rope_limit = found.rope_limit
        self._rebase_at = self._frame(found.rope_limit)
        self.stepwise = False
        """Whether a chunk that crosses evictions is attended as if fed token by token (see `exact_chunk`). Off under
        `generate`, where a prompt attends to itself as the model's own forward pass gives it."""

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
        return self.ring.nbytes + self._stock_bytes

    def reset(self) -> None:
        """Forget the conversation and give the memory back."""
        self.ring.reset()
        for _, layer in self._stock:
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
        own = [layer for _, layer in self._stock]
        stuck = [layer for layer in own if not croppable(layer)]
        if count and stuck:
            raise UnsupportedCall(f"a layer of the model's own ({stuck[0]!r}) cannot take tokens back once it has slid")
        self.ring.rollback(count)
        for layer in own:
            layer.crop(-count)

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
        if self.ring.kv_dtype is not None:  # the frame moves where it would token by token: keys age as turned there
            left = self._rebase_at - self.ring.next_position
            count = min(count, left if left > 0 else self._rebase_at - self.held)
        return self.ring.exact_chunk(count) if self._can_be_exact else self.ring.calm(count)

    @property
    def _can_be_exact(self) -> bool:
        """Whether a mask of our own reaches every layer, and only layers of ours."""
        return self._pure and self._config._attn_implementation in ("sdpa", "eager")

    # What transformers asks.

    def batch_select_indices(self, indices: Tensor) -> None:
        self.ring.select(indices)
        for _, layer in self._stock:
            layer.reorder_cache(cast(torch.LongTensor, indices))

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.ring.banks:
            self.batch_select_indices(torch.arange(self.ring.batch).repeat_interleave(repeats))

    # A forward pass.

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

    def _commit(self) -> None:
        self.ring.commit()

    # One token in a forward pass that other caches share (`together`).

    def begin_one(self) -> int:
        """A step of one token begins; its position, as the model counts."""
        self.ring.step = None
        self._check_layers()
        self._make_frame(1)
        self.ring.begin(1, 1)
        return self.ring.next_position

    def end_one(self) -> None:
        """The step is over."""
        self._commit()

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


def _numbers(policy: str | Policy[Any], budget: int | None, sinks: int | None) -> tuple[int, int]:
    """Budget and sinks of a policy that keeps a window; its own, unless it is given by name."""
    if policy == WINDOWED:
        if budget is None:
            raise BudgetError("a WindowCache needs a budget: the most tokens held, e.g. budget=512")
        return budget, SINKS if sinks is None else sinks
    made = _made(policy, budget, sinks)
    window = made.live()
    if not isinstance(window, Window):
        raise UnsupportedCall(f"{made.name} never evicts; use the model's own cache")
    return window.budget, window.pins


def ring_kind(kv_dtype: str | None) -> type[AnyRing[Any]]:
    """The ring that keeps K and V so; None is as the model makes them. Raises UnknownName."""
    if kv_dtype is None:
        return Ring
    if not isinstance(kv_dtype, str) or kv_dtype not in KV_DTYPES:
        raise UnknownName("kv_dtype", str(kv_dtype), KV_DTYPES, also="None, the model's own precision")
    return KV_DTYPES[kv_dtype]


def refuse_kv_dtype(kv_dtype: str | None, policy: str) -> None:
    """Raises UnsupportedCall where every head keeps its own, in another precision than the model's."""
    ring_kind(kv_dtype)
    if kv_dtype is not None:
        raise UnsupportedCall(
            f"kv_dtype={kv_dtype!r} works under streaming-llm and sliding-window; under {policy} every head keeps "
            f"tokens of its own, in the model's precision: leave kv_dtype out, or take one of those policies"
        )


def _made(policy: str | Policy[Any], budget: int | None, sinks: int | None) -> Policy[Any]:
    return make_policy(policy, **{k: v for k, v in (("budget", budget), ("sinks", sinks)) if v is not None})


def _under_policy(
    model: PreTrainedModel,
    policy: str | Policy[Any],
    budget: int | None = None,
    sinks: int | None = None,
    pinned: int = 0,
    block: int | None = None,
    reindex: str = "auto",
    *,
    reduce: str = "mean",
    mode: str = "decode",
    kv_dtype: str | None = None,
    examined: Examined | None = None,
) -> PolicyCache:
    """The cache of a policy under which every head keeps its own."""
    refuse_kv_dtype(kv_dtype, policy if isinstance(policy, str) else policy.name)
    live = _made(policy, budget, sinks).live(pinned, block)
    if not isinstance(live, Policy):
        raise UnsupportedCall(f"{live} keeps a window")
    how = "compact" if reindex == "auto" else reindex
    return PolicyCache(model, live, reduce=reduce, reindex=how, mode=mode, examined=examined)
