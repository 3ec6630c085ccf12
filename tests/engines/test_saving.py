"""Saved streams of transformers models: every family and precision, and what tells one model from another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from headwater.engines.snapshot import Snapshot
from headwater.engines.transformers import TransformersEngine
from headwater.errors import CacheStateError, SnapshotError, UnknownName, UnsupportedCall
from headwater.policies import policy
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


@pytest.mark.parametrize("family", families(window=True))
def test_every_family_goes_on_to_the_bit_with_its_pins_left_behind(family: str, tmp_path: Path):
    """Without re-indexing, after a rebase, and with slots that no longer lie in order."""
    opened = engine(tiny.build(family))
    stream: Any = opened.open(WINDOW, reindex=False)
    stream.feed(IDS[:1200])
    for token in IDS[1200:1210]:
        stream.feed([token])
    ring = stream._cache.ring
    assert ring.base > 0 and ring.ledger.position_of != sorted(ring.ledger.position_of)
    goes_on(opened, stream, tmp_path / "s", reindex=False)


def goes_on(opened: TransformersEngine, stream: Any, path: Path, **options: Any) -> None:
    """Single tokens, a chunk across evictions, a single one."""
    again = opened.restore(stream.save(path).path, stream.window, **options).stream
    for part in (IDS[3:4], IDS[4:5], IDS[5:60], IDS[60:61]):
        np.testing.assert_array_equal(again.feed(part), stream.feed(part))
        assert again.kept.tolist() == stream.kept.tolist()


@pytest.mark.parametrize("length", [3, 12, 39, 40, 41, 100])
def test_a_hybrid_model_in_low_precision_goes_on_to_the_bit_at_every_stage(length: int, tmp_path: Path):
    opened = engine(tiny.build("gemma3", dtype=torch.bfloat16))
    for window in (WINDOW, Window(budget=40), None):
        stream = opened.open(window)
        stream.feed(IDS[:length])
        goes_on(opened, stream, tmp_path / "s")


def test_a_snapshot_of_a_snapshot_of_a_snapshot(tmp_path: Path):
    opened = engine(tiny.build("llama", dtype=torch.bfloat16))
    stream = again = opened.open(WINDOW)
    for start in range(0, 900, 150):
        again = opened.restore(again.save(tmp_path / "s").path, WINDOW).stream
        np.testing.assert_array_equal(again.feed(IDS[start : start + 150]), stream.feed(IDS[start : start + 150]))


def test_memory_of_a_snapshot_is_used_again_when_it_is_gone_and_not_before():
    stream = engine(tiny.build("llama")).open(WINDOW)
    stream.feed(IDS[:50])

    def keys(snapshot: Snapshot) -> np.ndarray:
        return snapshot.parts["bank.0.keys"].array

    first = stream.snapshot()
    place, values = keys(first).ctypes.data, keys(first).copy()
    stream.feed(IDS[50:60])
    second = stream.snapshot()
    assert keys(second).ctypes.data != place
    np.testing.assert_array_equal(keys(first), values)
    del first
    assert keys(stream.snapshot()).ctypes.data == place


def test_a_great_deal_of_memory_is_given_back(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("headwater.cache.host.KEPT_BYTES", 20_000)
    stream: Any = engine(tiny.build("llama")).open(Window(budget=100))
    for length, kept in ((10, 1), (100, 0)):
        stream.feed(IDS[stream.seen : length])
        stream.snapshot()
        assert len(stream._host._spare) == kept


def test_a_restore_runs_no_forward_pass(tmp_path: Path):
    opened = engine(tiny.build("llama"))
    stream = opened.open(WINDOW)
    stream.feed(IDS[:50])
    path = stream.save(tmp_path / "s").path
    calls: list[None] = []
    opened.model.model.register_forward_hook(lambda *_: calls.append(None))
    opened.restore(path, WINDOW)
    assert not calls


def test_a_model_that_was_cast_is_examined_again():
    opened = engine(tiny.build("llama"))
    opened.open(WINDOW).feed(IDS[:5])
    opened.model.bfloat16()
    opened.open(WINDOW).feed(IDS[:5])


@pytest.mark.parametrize("window", [WINDOW, None], ids=str)
def test_a_step_that_failed_half_way_is_not_saved(window: Window | None):
    """The first layers of a growing cache have a token then that the others have not."""
    opened = engine(tiny.build("llama"))
    stream = opened.open(window)
    stream.feed(IDS[:30])

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    handle = opened.model.model.layers[2].register_forward_pre_hook(fail)
    with pytest.raises(ZeroDivisionError):
        stream.feed(IDS[30:31])
    handle.remove()
    with pytest.raises(CacheStateError):
        stream.snapshot()


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral-sliding", "gpt2", "bloom"])
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


def test_a_model_saved_elsewhere_and_loaded_again_is_the_same(tmp_path: Path):
    model = tiny.build("llama")
    before = engine(model).fingerprint
    model.save_pretrained(tmp_path / "model")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert engine(again).fingerprint == engine(model).fingerprint == before
    assert engine(tiny.build("llama", attention="eager")).fingerprint == before
    other: list[dict[str, Any]] = [
        {"rms_norm_eps": 1e-3},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}},
    ]
    for changes in other:
        assert engine(tiny.build("llama", **changes)).fingerprint != before


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


@pytest.mark.parametrize("family", ["llama", "glm4", "gemma3", "smollm3"])
@pytest.mark.parametrize("before", [5, 50, 620])
def test_a_stream_in_int8_goes_on_to_the_bit(family: str, before: int, tmp_path: Path):
    """Before anything aged, after evictions, after a rebase."""
    opened = TransformersEngine(tiny.build(family), NoTokenizer(), name="tiny", kv_dtype="int8")
    stream = opened.open(WINDOW)
    stream.feed(IDS[:before])
    goes_on(opened, stream, tmp_path / "s")
    with pytest.raises(SnapshotError, match="of another model"):
        engine(opened.model).restore(tmp_path / "s", WINDOW)


def test_int8_is_refused_where_every_head_keeps_its_own():
    opened = TransformersEngine(tiny.build("llama"), NoTokenizer(), name="tiny", kv_dtype="int8")
    with pytest.raises(UnsupportedCall, match="works under streaming-llm and sliding-window; under tova"):
        opened.open(policy("tova", budget=40))
    with pytest.raises(UnknownName, match="unknown kv_dtype 'int3'"):
        TransformersEngine.load("no such model", kv_dtype="int3")
