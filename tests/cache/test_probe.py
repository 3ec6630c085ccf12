"""The attach-time measurement: it finds what is there, and refuses what it cannot explain."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headwater.cache.adapter import WindowCache
from headwater.cache.hosted import examine
from headwater.cache.probe import read_rope
from headwater.errors import UnsupportedModel
from tests import tiny


def rotations(name: str, **changes: Any) -> list[tuple[str, int, float] | None]:
    model = tiny.build(name, **changes)
    shapes = examine(model).shapes
    known = [shape.rotation if shape else None for shape in shapes]
    return [(r.layout, r.pairs, round(r.frequencies[-1], 6)) if r else None for r in known]


def test_two_bases_are_told_apart_layer_by_layer() -> None:
    """gemma3: sliding layers turn with base 10,000 and full ones with 1,000,000."""
    assert rotations("gemma3") == [("half", 4, 0.001), ("half", 4, 3.2e-05)] * 2


def test_layers_without_rotary_are_found() -> None:
    assert [r is None for r in rotations("smollm3")] == [False, False, False, True]
    assert [r is None for r in rotations("cohere2")] == [False, True, False, True]


def test_interleaved_pairs_are_told_from_halves() -> None:
    assert rotations("glm4") == [("interleaved", 2, 0.01)] * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_precise_enough(dtype: torch.dtype) -> None:
    model = tiny.build("gemma3", dtype=dtype)
    shapes = examine(model).shapes
    found = [s.rotation.frequencies[-1] for s in shapes if s and s.rotation]
    assert found == pytest.approx([0.001, 3.16e-05] * 2, rel=1e-2)  # the buffers themselves are rounded


def test_a_rotation_that_nothing_explains_is_refused_with_the_layer_and_the_error() -> None:
    model = tiny.build("llama")
    rotary = model.model.rotary_emb
    plain = rotary.forward
    rotary.forward = lambda x, position_ids: plain(x, position_ids**2)
    with pytest.raises(UnsupportedModel, match=r"layer 0 .* no known rotation explains: .* off by [0-9.]+, allowed"):
        WindowCache(model, 20)


def test_keys_that_are_all_zero_prove_nothing() -> None:
    model = tiny.build("llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight.zero_()
    with pytest.raises(UnsupportedModel, match="layer 1 caches keys that are all zero"):
        WindowCache(model, 20)


@pytest.mark.parametrize(("name", "limit"), [("llama", None), ("yarn", None), ("dynamic", 512), ("longrope", 256)])
def test_where_frequencies_would_change(name: str, limit: int | None) -> None:
    assert read_rope(tiny.build(name).base_model).last_position == limit


def test_attaching_leaves_the_models_output_as_it_was() -> None:
    for name in ("llama", "dynamic", "longrope"):
        model = tiny.build(name)
        with torch.inference_mode():
            before = model(input_ids=tiny.tokens(30)).logits
            WindowCache(model, 20)
            assert torch.equal(model(input_ids=tiny.tokens(30)).logits, before)
