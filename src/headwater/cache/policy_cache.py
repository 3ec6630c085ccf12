"""The drop-in cache of policies that look at attention: every layer keeps what its policy wants, each kv-head its own.

Knows how a model is made to show its attention while this cache is passed (`attach`), what the layers of a model are
given of the budget, and which positions the model is told. Does not know what a layer does with its tokens (`kept`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any, cast

import headwater.cache.versions  # noqa: F401  first: other releases lack what is imported below

# isort: split
import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from headwater.cache.attending import UNDER_WAY
from headwater.cache.attention import attended, attention_weights
from headwater.cache.bank import Shape
from headwater.cache.call import read_call
from headwater.cache.host import Copies
from headwater.cache.hosted import (
    Examined,
    HostedCache,
    OurLayer,
    base_model,
    croppable,
    examine,
    foreign,
    full_layers,
    load_stock,
    stock_cache,
    stock_state,
)
from headwater.cache.kept import REDUCTIONS, KeptGroup
from headwater.cache.saved import State, kept_state, load_kept
from headwater.cache.turning import Turning
from headwater.errors import BudgetError, CacheStateError, UnsupportedCall, UnsupportedModel, UsageError
from headwater.policies import POLICIES, Policy
from headwater.policies.signals import ATTENTION

NAME = "headwater_kept"
"""What transformers knows our attention function by."""

ABLE = ("sdpa", "eager")
"""The attention that a model may have been loaded with."""

_switching = Lock()
_attached: dict[int, tuple[int, str]] = {}
"""By a config: how many blocks have attached it, and the attention it had before the first."""


@contextmanager
def attach(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Let policies that look at attention see that of this model, as long as the block lasts.

    Forward passes without such a cache go on as they were, through `sdpa`. On exit the model is what it was, whatever
    happened inside. Blocks may be nested, and threads may each have one. Raises UnsupportedModel for what is no decoder
    of transformers, UnsupportedCall for one that was loaded with another attention than sdpa or eager.
    """
    base_model(model)
    config = model.config.get_text_config(decoder=True)
    with _switching:
        count, before = _attached.get(id(config), (0, config._attn_implementation))
        if before not in ABLE:
            raise UnsupportedCall(
                f"the model's attention is {before!r}, which shows no weights; load it with attn_implementation='sdpa'"
            )
        if NAME not in ALL_ATTENTION_FUNCTIONS.valid_keys():
            ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)
            ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)
        _attached[id(config)] = count + 1, before
        config._attn_implementation = NAME
    try:
        yield model
    finally:
        with _switching:
            count, before = _attached.pop(id(config))
            if count > 1:
                _attached[id(config)] = count - 1, before
            else:
                config._attn_implementation = before


def _attention(
    module: Any,
    query: Float[Tensor, "batch heads tokens dim"],
    key: Float[Tensor, "batch kv_heads keys dim"],
    value: Float[Tensor, "batch kv_heads keys value_dim"],
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Float[Tensor, " heads"] | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention over what a layer of the cache under way keeps; as sdpa has it, everywhere else."""
    cache = UNDER_WAY.get()
    group = None if cache is None else cache.group_of.get(module.layer_idx)
    if cache is None or group is None:
        if softcap is not None or s_aux is not None:  # which sdpa leaves out
            weights = attention_weights(query, key, scaling=scaling, softcap=softcap, sinks=s_aux, mask=attention_mask)
            return attended(weights, value).transpose(1, 2).contiguous(), None
        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **others)
        return output, None
    cache.reached.add(module.layer_idx)
    how = {"scaling": scaling, "softcap": softcap, "sinks": s_aux}
    return group.attend(module.layer_idx, query, key, value, **how), None


class KeptOf(OurLayer):
    """One full-attention layer of a PolicyCache: hands the new tokens on as they are; attention takes them in."""

    def __init__(self, cache: PolicyCache) -> None:
        self._cache = weakref.ref(cache)  # the cache owns it, and is gone when its user lets go

    def _seen(self) -> int:
        cache = self._cache()
        return 0 if cache is None else cache.seen

    @property
    def is_initialized(self) -> bool:
        return self._seen() > 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if UNDER_WAY.get() is not self._cache():  # said before a layer of the model's own takes the tokens in
            raise foreign()
        return query_length, self._seen()

    def get_seq_length(self) -> int:
        return self._seen()


class PolicyCache(HostedCache):
    """A transformers cache that keeps, in every kv-head of every layer, what a policy keeps of a stream of any length.

    `policy` has the budget of a layer; one that shares it out (pyramidkv) gives every layer its own. K and V lie in
    buffers of `budget + 1` slots; nothing is gathered or moved at a step. Tokens attend and leave one after another, as
    the policy is defined, however a text is cut into calls.

    reduce: how the weights of the query heads of a group become those of their kv-head: "mean" (of which "sum" differs
    only for a policy that compares with an even share) or "max". reindex: "none" leaves the keys at their distance in
    the stream, "compact" closes the gaps: kept tokens lie one after another to the model, turned from how they were
    written. mode: "decode" evicts token by token; "prompt" picks from a first call beyond the budget at its end, by
    what its last tokens attended to, as the papers of snapkv and pyramidkv do, and goes on token by token: the prompt
    attends to all of itself, and its K and V are there in full, a layer at a time. Passing the cache to the model needs
    `attach`. Raises as `WindowCache` does.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        policy: Policy[Any],
        *,
        reduce: str = "mean",
        reindex: str = "compact",
        mode: str = "decode",
        examined: Examined | None = None,
    ) -> None:
        if reduce not in REDUCTIONS:
            raise UsageError(f"reduce must be one of {', '.join(REDUCTIONS)}, got {reduce!r}")
        if reindex not in ("compact", "none"):
            raise UsageError(f"reindex must be 'compact' or 'none' under {policy.name}, got {reindex!r}")
        if mode not in ("decode", "prompt"):
            raise UsageError(f"mode must be 'decode' or 'prompt', got {mode!r}")
        if mode == "prompt" and not policy.prompt_steps:
            able = [name for name, kind in POLICIES.items() if kind().prompt_steps]
            raise UsageError(
                f"{policy.name} is not defined on the end of a prompt; mode='prompt' is for {', '.join(able)}"
            )
        found = examine(model) if examined is None else examined
        layers = list(stock_cache(model).layers)
        own = full_layers(model, layers)
        self.policy, self.reduce, self.reindex, self.mode = policy, reduce, reindex, mode
        self._shapes = {index: cast(Shape, found.shapes[index]) for index in own}
        self._policies = {index: policy.at_layer(depth, len(own)) for depth, index in enumerate(own)}
        self._check_policy()
        self._pure, self._limit = len(own) == len(layers), found.rope_limit
        self._check_budget(model)
        for index in own:
            layers[index] = KeptOf(self)
        self.groups: list[KeptGroup] = []
        self.group_of: dict[int, KeptGroup] = {}
        self.reached: set[int] = set()
        self._seen = 0
        self._count = 0
        super().__init__(model, layers)

    # What is held.

    @property
    def seen(self) -> int:
        return self._seen

    @property
    def held(self) -> int:
        """Tokens held now, in the layer that holds most."""
        return max((group.holdings.held for group in self.groups), default=0)

    @property
    def kept(self) -> NDArray[np.int64]:
        """Positions that any head of any layer holds, ascending."""
        return np.unique(np.concatenate([np.empty(0, dtype=np.int64), *map(np.ravel, self.kept_by_layer().values())]))

    def kept_by_layer(self) -> dict[int, NDArray[np.int64]]:
        """Positions held by each layer, `[batch * kv_heads, held]`, ascending in every row."""
        found = {index: each for group in self.groups for index, each in group.by_layer().items()}
        return dict(sorted(found.items()))

    @property
    def nbytes(self) -> int:
        """Physical bytes of K and V of all layers, the model's own sliding layers included."""
        return sum(group.nbytes for group in self.groups) + self._stock_bytes

    def oldest(self, pins: int) -> int:
        """The oldest position that any head holds beside the first `pins`; `seen` where none is."""
        rest = [positions[positions >= pins] for positions in self.kept_by_layer().values()]
        return min((int(each.min()) for each in rest if each.size), default=self.seen)

    def longest(self, count: int) -> int:
        """How many of the next `count` tokens can go in one forward pass."""
        return count if self._limit is None else max(1, min(count, self._limit - self._place()))

    def state(self, copies: Copies) -> State:
        """All that the next step would use, copied. Raises UnsupportedCall for a model with layers of another kind."""
        self._refuse_half()
        return kept_state(self.seen, self.groups, copies) | stock_state(self, copies)

    def load(self, state: State) -> None:
        """Make this fresh cache what another one was. Raises SnapshotError when that does not fit."""
        self._seen = int(state.numbers["seen"])
        if self._seen:
            self._make(int(state.numbers["batch"]))
            load_kept(self.groups, state)
        load_stock(self, state)

    def reset(self) -> None:
        """Forget the conversation and give the memory back."""
        self.groups, self.group_of, self.reached = [], {}, set()
        self._seen = self._count = 0
        for _, layer in self._stock:
            layer.reset()

    def rollback(self, count: int) -> None:
        """Take back the newest `count` tokens, exactly.

        Raises CacheStateError where that is not possible: when another token left for them, or when they are more than
        the policy remembers the way back for (`holdings.ROLLBACK`). UnsupportedCall when a layer of the model's own
        cannot.
        """
        self._refuse_half()
        if count < 0 or count > self.seen:
            raise UsageError(f"cannot roll back {count} tokens: {self.seen} were fed")
        own = [layer for _, layer in self._stock]
        stuck = [layer for layer in own if not croppable(layer)]
        if count and stuck:
            raise UnsupportedCall(f"a layer of the model's own ({stuck[0]!r}) cannot take tokens back once it has slid")
        for group in self.groups:
            group.check_rollback(count)
        for group in self.groups:
            group.rollback(count)
        for layer in own:
            layer.crop(-count)
        self._seen -= count

    def batch_select_indices(self, indices: Tensor) -> None:
        for group in self.groups:
            group.select(indices)
        for _, layer in self._stock:
            layer.reorder_cache(cast(torch.LongTensor, indices))

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.groups:
            batch = next(iter(self.groups[0].layers.values())).keys.shape[0]
            self.batch_select_indices(torch.arange(batch).repeat_interleave(repeats))

    # A forward pass.

    def _begin(self, base: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        self._refuse_half()
        if self._config.get_text_config(decoder=True)._attn_implementation != NAME:
            raise UnsupportedCall(
                f"{self.policy.name} looks at attention, which the model does not show; call it in a block of "
                "`with headwater.attach(model):`"
            )
        self._check_layers()
        call = read_call(args, kwargs, seen=self.seen)
        if torch.is_grad_enabled() and any(p.requires_grad for p in base.parameters()):
            raise UnsupportedCall("a WindowCache is for inference; call the model under torch.inference_mode()")
        first = self._next(call.count)
        if not self.groups:
            self._make(call.batch)
        self._check_batch(call.batch)
        kwargs = dict(kwargs)
        if first != self.seen or call.positions is None:
            positions = torch.arange(first, first + call.count, device=call.device)[None]
            kwargs["position_ids"] = positions
        self._count, self.reached = call.count, set()
        for group in self.groups:
            group.begin(first, call.count)
        UNDER_WAY.set(self)
        return args, kwargs

    def _check_batch(self, rows: int) -> None:
        held = next(iter(self.groups[0].layers.values())).keys.shape[0]
        if rows != held:
            raise CacheStateError(f"the cache holds a batch of {held} rows and was given {rows}; reset() it first")

    def _refuse_half(self) -> None:
        if self._count:
            raise CacheStateError("an earlier forward pass failed half way, so nobody knows what is held; reset() it")

    def _commit(self) -> None:
        missing = sorted(set(self.group_of) - self.reached)
        if missing:
            raise UnsupportedModel(f"layers {missing} compute attention by themselves, so no policy can see it")
        for group in self.groups:
            group.commit()
        self._seen += self._count
        self._count = 0

    def _end(self) -> None:
        UNDER_WAY.set(None)

    def _make(self, batch: int) -> None:
        """Take the memory for a batch of so many rows. Layers that get the same of the budget make a group."""
        turnings: dict[Any, Turning] = {}
        alike: dict[Any, dict[int, Shape]] = {}
        for index, shape in self._shapes.items():
            alike.setdefault((self._policies[index], shape.kv_heads), {})[index] = shape
            if self.reindex == "compact" and shape.rotation is not None and shape.rotation not in turnings:
                turnings[shape.rotation] = Turning(shape.rotation, shape.device, self._frame)
        for (policy, _), shapes in alike.items():
            mine = {i: turnings[shape.rotation] for i, shape in shapes.items() if shape.rotation in turnings}
            self.groups.append(
                KeptGroup(policy, shapes, mine, batch=batch, reduce=self.reduce, prompt=self.mode == "prompt")
            )
        self.group_of = {index: group for group in self.groups for index in group.layers}

    # Positions.

    @property
    def _frame(self) -> int:
        """Slots of the largest layer: with the gaps closed no position needs to be higher."""
        return max(policy.budget for policy in self._policies.values()) + 1

    def _place(self) -> int:
        return min(self.seen, self._frame) if self.reindex == "compact" and self._pure else self.seen

    def _next(self, count: int) -> int:
        """Position of the next token, as the model counts. With the gaps closed only distances to it matter."""
        first = self._place()
        if self._limit is not None and first + count > self._limit:
            raise UnsupportedCall(
                f"{count} tokens in one forward pass would reach position {first + count}, and this model's rotary "
                f"frequencies change at {self._limit}; feed them in pieces"
            )
        return first

    def _check_policy(self) -> None:
        if missing := sorted(self.policy.needs - {ATTENTION}):
            raise UnsupportedCall(
                f"{self.policy.name} needs {', '.join(missing)}; a cache shows a policy attention alone"
            )
        layers, given = len(self._policies), sum(each.budget for each in self._policies.values())
        if given > layers * self.policy.budget:
            raise BudgetError(
                f"{self.policy.name} gives its {layers} layers {given} tokens together, and {layers} times the budget "
                f"of {self.policy.budget} are {layers * self.policy.budget}; raise the budget, or lower what every "
                f"layer keeps in any case (sinks, recent_window)"
            )

    def _check_budget(self, model: PreTrainedModel) -> None:
        trained = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        if trained is not None and self._frame > trained:
            raise BudgetError(
                f"{self.policy.name}: a layer's budget of {self._frame - 1} tokens needs one position more, and the "
                f"model's trained length is {trained}; lower the budget"
            )
