"""The ring against its slow twin: families, attention implementations, blocks, rebases, chunks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from headwater.cache.adapter import RingLayer, WindowCache
from headwater.cache.hosted import examine, stock_cache
from headwater.errors import UnsupportedModel
from headwater.policies.window import Window
from tests import tiny
from tests.reference.raw_keys import RawKeys

SUPPORTED = [name for name, family in tiny.FAMILIES.items() if family.refused is None]
VARIANTS = [(name, attention) for name in SUPPORTED for attention in tiny.FAMILIES[name].attention]


def short(name: str) -> dict[str, Any]:
    """Changes that make the family's positions end at 64, so that 150 tokens rebase several times."""
    rope = tiny.FAMILIES[name].options.get("rope_parameters", {})
    changes: dict[str, Any] = {"max_position_embeddings": 64}
    if "original_max_position_embeddings" in rope:
        changes["rope_parameters"] = {**rope, "original_max_position_embeddings": 64}
    return changes


def twin_of(model: Any, window: Window, *, reindex: bool = True) -> RawKeys:
    stock, shapes = stock_cache(model).layers, examine(model).shapes
    known = [shape for shape in shapes if shape is not None]
    return RawKeys(known, [getattr(layer, "sliding_window", None) for layer in stock], window, reindex=reindex)


def feed(model: Any, cache: WindowCache, tokens: Tensor, size: int) -> Tensor:
    """Logits of feeding the tokens in calls of at most `size`, split where the cache asks for it."""
    out: list[Tensor] = []
    cache.stepwise = True
    start = 0
    with torch.inference_mode():
        while start < tokens.shape[1]:
            count = cache.exact_chunk(min(size, tokens.shape[1] - start))
            out.append(model(input_ids=tokens[:, start : start + count], cache=cache).logits)
            start += count
    return torch.cat(out, dim=1)


@pytest.mark.parametrize("block", [1, 5])
@pytest.mark.parametrize(("name", "attention"), VARIANTS)
def test_every_family_equals_the_twin_across_evictions_and_rebases(name: str, attention: str, block: int) -> None:
    model = tiny.build(name, attention=attention, **short(name))
    tokens = tiny.tokens(150, rows=2)
    cache = WindowCache(model, 20, sinks=4, block=block)
    ours = feed(model, cache, tokens, 1)
    theirs = twin_of(model, cache.window).run(model, tokens)
    assert cache.ring.base > 0, "the stream was too short to rebase"
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(("sinks", "block"), [(0, 1), (0, 4), (4, 1), (4, 3), (12, 8), (19, 1)])
def test_a_chunk_that_crosses_evictions_equals_the_twin(sinks: int, block: int, attention: str) -> None:
    model = tiny.build("llama", attention=attention, **short("llama"))
    tokens = tiny.tokens(150, rows=2)
    cache = WindowCache(model, 20, sinks=sinks, block=block)
    theirs = twin_of(model, cache.window).run(model, tokens)
    for size in (7, 64, 150):
        cache.reset()
        torch.testing.assert_close(feed(model, cache, tokens, size), theirs, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("size", [1, 64])
@pytest.mark.parametrize("name", ["llama", "glm4", "smollm3", "yarn"])
def test_left_where_they_were_equals_the_twin(name: str, size: int) -> None:
    """`reindex="none"`: pins keep their distance in the whole stream, also when the frame is rebased."""
    model = tiny.build(name, **short(name))
    tokens = tiny.tokens(150)
    cache = WindowCache(model, 20, sinks=4, block=1, reindex="none")
    theirs = twin_of(model, cache.window, reindex=False).run(model, tokens)
    torch.testing.assert_close(feed(model, cache, tokens, size), theirs, atol=5e-4, rtol=1e-3)


@pytest.mark.parametrize("block", [1, 5])
@pytest.mark.parametrize("name", ["llama", "phi3", "glm4", "gpt_neox", "yarn", "llama3"])
def test_the_twin_equals_a_masked_forward_pass(name: str, block: int) -> None:
    model = tiny.build(name)
    tokens = tiny.tokens(90)
    window = Window(budget=20, pins=4, block=block)
    shown = torch.zeros(90, 90, dtype=torch.bool)
    gone = held = 0
    for query in range(90):
        held += 1
        shown[query, : min(4, query + 1)] = True
        shown[query, 4 + gone : query + 1] = True
        if held > 20:
            gone, held = gone + block * -(-(held - 20) // block), held - block * -(-(held - 20) // block)
    with torch.inference_mode():
        masked = model(input_ids=tokens, attention_mask=shown[None, None]).logits
    theirs = twin_of(model, window, reindex=False).run(model, tokens)
    torch.testing.assert_close(masked, theirs, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", [name for name, family in tiny.FAMILIES.items() if family.refused])
def test_families_that_cannot_work_are_refused_with_the_reason(name: str) -> None:
    with pytest.raises(UnsupportedModel, match=str(tiny.FAMILIES[name].refused)):
        WindowCache(tiny.build(name), 20)


def test_hybrid_models_keep_their_own_sliding_layers() -> None:
    cache = WindowCache(tiny.build("gemma3"), 20)
    assert [isinstance(layer, RingLayer) for layer in cache.layers] == [False, True, False, True]
