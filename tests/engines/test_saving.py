"""Saved streams of transformers models: every family and precision, and what tells one model from another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headwater.engines.transformers import TransformersEngine
from headwater.errors import SnapshotError, UnsupportedCall
from headwater.policies.window import Window
from tests import tiny
from tests.engines.test_attention import NoTokenizer

WINDOW = Window(budget=40, pins=6, block=4)
IDS = [(index * 37 + index // 7) % (tiny.VOCAB - 8) + 4 for index in range(1800)]


def engine(model: Any) -> TransformersEngine:
    return TransformersEngine(model, NoTokenizer(), name="tiny")


def families(window: bool) -> list[str]:
    return [name for name, family in tiny.FAMILIES.items() if not window or family.refused is None]


@pytest.mark.parametrize("family", families(window=True))
@pytest.mark.parametrize("before", [30, 150, 1200])
def test_every_family_goes_on_to_the_bit(family: str, before: int, tmp_path: Path):
    """Past the trained length, so that positions were rebased."""
    opened = engine(tiny.build(family))
    stream = opened.open(WINDOW)
    stream.feed(IDS[:before])
    saved = stream.save(tmp_path / "s")
    again = opened.restore(saved.path, WINDOW).stream
    for start in range(before, before + 12):
        np.testing.assert_array_equal(again.feed(IDS[start : start + 1]), stream.feed(IDS[start : start + 1]))
    rest = IDS[before + 12 : before + 500]
    np.testing.assert_array_equal(again.feed(rest), stream.feed(rest))


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral-sliding"])
def test_a_growing_cache_goes_on_to_the_bit(family: str, tmp_path: Path):
    opened = engine(tiny.build(family))
    stream = opened.open(None)
    stream.feed(IDS[:200])
    again = opened.restore(stream.save(tmp_path / "s").path, None).stream
    assert again.nbytes <= stream.nbytes  # what a sliding layer let go is not copied
    for start in range(200, 230):
        np.testing.assert_array_equal(again.feed(IDS[start : start + 1]), stream.feed(IDS[start : start + 1]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_goes_on_to_the_bit(dtype: torch.dtype, tmp_path: Path):
    opened = engine(tiny.build("llama", dtype=dtype))
    stream = opened.open(WINDOW)
    stream.feed(IDS[:700])
    again = opened.restore(stream.save(tmp_path / "s").path, WINDOW).stream
    np.testing.assert_array_equal(again.feed(IDS[700:900]), stream.feed(IDS[700:900]))


def test_other_weights_or_another_precision_are_refused(tmp_path: Path):
    model = tiny.build("llama")
    stream = engine(model).open(WINDOW)
    stream.feed(IDS[:50])
    path = stream.save(tmp_path / "s").path
    engine(tiny.build("llama")).restore(path, WINDOW)
    other = tiny.build("llama")
    with torch.no_grad():
        other.model.layers[2].mlp.up_proj.weight[3, 5] += 1e-3
    for changed in (other, tiny.build("llama", dtype=torch.bfloat16), tiny.build("qwen2")):
        with pytest.raises(SnapshotError, match="of another model, or of other weights"):
            engine(changed).restore(path, WINDOW)


def test_a_layer_with_another_kind_of_state_is_refused(tmp_path: Path):
    opened = engine(tiny.build("llama"))
    stream: Any = opened.open(None)
    stream.feed(IDS[:10])

    class Other(type(stream._cache.layers[0])):
        pass

    stream._cache.layers[1].__class__ = Other
    with pytest.raises(UnsupportedCall, match="layer 1 is a Other, whose state cannot be saved"):
        stream.save(tmp_path / "s")
    assert not list(tmp_path.iterdir())


def test_only_what_is_held_is_written(tmp_path: Path):
    opened = engine(tiny.build("llama"))
    stream = opened.open(Window(budget=400, pins=4, block=8))
    stream.feed(IDS[:50])
    small = stream.save(tmp_path / "s").nbytes
    stream.feed(IDS[50:400])
    large = stream.save(tmp_path / "s").nbytes
    assert small < large / 3
    assert large < stream.nbytes * 1.02 + 8192
