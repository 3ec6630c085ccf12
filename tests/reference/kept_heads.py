"""The slow twin of a cache under a policy: one token at a time, one kv-head at a time, lists of keys, float64.

    1. the model is run on a single token, without any cache, at that token's own position
    2. each kv-head appends the token's key and value to its list
    3. with the gaps closed, every key of the list is turned from where it was written to where it lies; else not
    4. softmax over the list, query head by query head, with the scale, softcap and learned sink of the model
    5. the mean of the group's weights is shown to the head's own `Incremental` policy, which then may evict

With a `prompt` of so many tokens nothing leaves before its last one, and then all that is over the budget at once.
Layers with a sliding window of their own are kept whole up to that window. Checked against by
`tests/cache/test_policy_cache.py`; with a budget that never fills it equals the model's own forward pass, there too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from headwater.policies import Incremental, Policy
from headwater.rotary import Rotation


@dataclass
class Head:
    """What one kv-head holds; the position of every key, the key as it was written, the value."""

    policy: Incremental[Any]
    budget: int
    positions: list[int] = field(default_factory=list)
    keys: list[np.ndarray] = field(default_factory=list)
    values: list[np.ndarray] = field(default_factory=list)


class KeptHeads:
    """A stream under a policy. `rotations` are those of the layers, `sliding` their own windows (None: ours)."""

    def __init__(
        self,
        policy: Policy[Any],
        rotations: Sequence[Rotation | None],
        sliding: Sequence[int | None],
        kv_heads: int,
        *,
        compact: bool,
        prompt: int = 0,
    ) -> None:
        own = [layer for layer, window in enumerate(sliding) if window is None]
        choices = {layer: policy.at_layer(depth, len(own)) for depth, layer in enumerate(own)}
        self.heads = {layer: [_head(choices[layer], prompt) for _ in range(kv_heads)] for layer in own}
        self.windows = {layer: [_head(policy, prompt) for _ in range(kv_heads)] for layer in range(len(sliding))}
        self.prompt = prompt
        self.rotations, self.sliding, self.compact = rotations, sliding, compact
        self.now = 0
        self.shown: list[dict[tuple[int, int], dict[int, float]]] = []
        """For every token, the weights that each head gave to the positions it held."""

    def run(self, model: Any, tokens: Tensor) -> Tensor:
        """Logits of one row of tokens, `[tokens, vocab]`."""
        config = model.config.get_text_config(decoder=True)
        before = config._attn_implementation
        ALL_ATTENTION_FUNCTIONS.register("slow_twin", self._attention)
        out = []
        try:
            config._attn_implementation = "slow_twin"
            with torch.inference_mode():
                for token in tokens.tolist():
                    self.shown.append({})
                    place = torch.tensor([[self.now]])
                    ids = torch.tensor([[token]])
                    out.append(model(input_ids=ids, position_ids=place, use_cache=False).logits[0, -1])
                    self.now += 1
        finally:
            config._attn_implementation = before
        return torch.stack(out)

    def kept(self, layer: int) -> list[list[int]]:
        return [head.positions for head in self.heads[layer]]

    def _attention(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: Any = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        layer, heads = module.layer_idx, query.shape[1]
        group = heads // key.shape[1]
        out = np.zeros((heads, value.shape[-1]))
        for number in range(key.shape[1]):
            ours = self.sliding[layer] is None
            head = (self.heads if ours else self.windows)[layer][number]
            head.positions.append(self.now)
            head.keys.append(key[0, number, 0].double().numpy())
            head.values.append(value[0, number, 0].double().numpy())
            if not ours and len(head.positions) > (self.sliding[layer] or 0):
                del head.positions[0], head.keys[0], head.values[0]
            total = np.zeros(len(head.positions))
            for q in range(number * group, (number + 1) * group):
                weights = self._weights(layer, head, query[0, q, 0].double().numpy(), scaling, softcap)
                if s_aux is not None:
                    scores = weights
                    sink = float(s_aux[q])
                    top = max(scores.max(), sink)
                    weights = np.exp(scores - top) / (np.exp(scores - top).sum() + math.exp(sink - top))
                else:
                    weights = np.exp(weights - weights.max()) / np.exp(weights - weights.max()).sum()
                out[q] = weights @ np.stack(head.values)
                total += weights / group
            if ours:
                self._decide(layer, number, head, total)
        return torch.tensor(out, dtype=query.dtype)[None, None], None

    def _weights(self, layer: int, head: Head, query: np.ndarray, scaling: Any, softcap: Any) -> np.ndarray:
        scale = query.shape[0] ** -0.5 if scaling is None else scaling
        last = len(head.positions) - 1
        scores = []
        for rank, (position, key) in enumerate(zip(head.positions, head.keys, strict=True)):
            closes = self.compact and self.sliding[layer] is None
            wanted = self.now - (last - rank) if closes else position
            score = float(query @ turned(key, wanted - position, self.rotations[layer])) * scale
            scores.append(softcap * math.tanh(score / softcap) if softcap is not None else score)
        return np.array(scores)

    def _decide(self, layer: int, number: int, head: Head, weights: np.ndarray) -> None:
        self.shown[-1][layer, number] = dict(zip(head.positions[:-1], weights.tolist(), strict=False))
        policy = head.policy
        if self.now:
            policy.on_decode_step(self.now, weights[:-1].tolist() if policy.policy.needs else None)
        if policy.kept_count() > head.budget and self.now + 1 >= self.prompt:
            for gone in policy.evict(head.budget):
                index = head.positions.index(gone)
                del head.positions[index], head.keys[index], head.values[index]


def _head(policy: Policy[Any], prompt: int) -> Head:
    """One that has room for the prompt, however little stays of it."""
    room = replace(policy, budget=policy.budget + prompt)
    return Head(Incremental(room), policy.budget)


def turned(key: np.ndarray, shift: int, rotation: Rotation | None) -> np.ndarray:
    """A key moved by so many positions."""
    if rotation is None or shift == 0:
        return key
    out = key.copy()
    for pair, frequency in enumerate(rotation.frequencies):
        start = rotation.start
        half = rotation.layout == "half"
        i, j = (start + pair, start + pair + rotation.pairs) if half else (start + 2 * pair, start + 2 * pair + 1)
        angle = shift * frequency
        out[i] = key[i] * math.cos(angle) - key[j] * math.sin(angle)
        out[j] = key[j] * math.cos(angle) + key[i] * math.sin(angle)
    return out
