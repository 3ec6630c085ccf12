"""The laws of watched attention, for every engine that shows it. A new engine is one line in `conftest.ENGINES`."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest

from headwater.engines.base import Engine
from headwater.errors import ContextFull, UnsupportedCall, UsageError
from headwater.policies.window import Window

TEXT = np.random.default_rng(3).integers(0, 256, 100).tolist()
BLOCKS = pytest.mark.parametrize("block", [1, 7, 64, 100, 1000])


def watched(engine: Engine, tokens: list[int] = TEXT, **options: Any) -> np.ndarray:
    """Everything at once, `[layers, heads, tokens, positions]`; rows before `start` are zeros."""
    blocks = list(engine.attention(tokens, **options))
    layers, heads = blocks[0].weights.shape[:2]
    whole = np.zeros((layers, heads, len(tokens), len(tokens)), dtype=blocks[0].weights.dtype)
    for block in blocks:
        count, positions = block.weights.shape[2:]
        assert positions == block.first + count
        whole[:, :, block.first : block.first + count, :positions] = block.weights
    return whole


@pytest.fixture(scope="module", autouse=True)
def shown(engine: Engine) -> None:
    """An engine may show no attention at all; then it says so."""
    try:
        engine.attention_layers()
    except UnsupportedCall as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def whole(engine: Engine) -> np.ndarray:
    return watched(engine)


def test_every_layer_and_head_is_shown_and_each_row_sums_to_one(engine: Engine, whole: np.ndarray):
    layers, heads = engine.attention_heads()
    assert whole.shape == (layers, heads, len(TEXT), len(TEXT))
    assert len(engine.attention_layers()) == layers
    assert list(engine.attention_layers()) == sorted(set(engine.attention_layers()))
    assert whole.dtype == np.float32
    assert whole.min() >= 0
    np.testing.assert_allclose(whole.sum(-1), 1, atol=1e-5)


def test_no_token_pays_to_a_later_one(whole: np.ndarray):
    later = np.triu(np.ones(whole.shape[-2:], dtype=bool), 1)
    assert not whole[:, :, later].any()


def test_what_comes_later_changes_nothing(engine: Engine, whole: np.ndarray):
    other = [*TEXT[:50], *reversed(TEXT[50:])]
    np.testing.assert_allclose(watched(engine, other)[:, :, :50], whole[:, :, :50], rtol=0, atol=1e-5)
    assert abs(watched(engine, other) - whole).max() > 0.01


def test_heads_and_layers_differ(whole: np.ndarray):
    rows = whole.reshape(-1, *whole.shape[2:])
    for index, row in enumerate(rows):
        assert all(abs(row - other).max() > 0.01 for other in rows[:index])


@BLOCKS
def test_the_block_changes_nothing(engine: Engine, whole: np.ndarray, block: int, tolerance: float):
    np.testing.assert_allclose(watched(engine, block=block), whole, rtol=0, atol=tolerance)
    sizes = [part.weights.shape[2] for part in engine.attention(TEXT, block=block)]
    assert sizes[:-1] == [block] * (len(sizes) - 1)
    assert sum(sizes) == len(TEXT)


@pytest.mark.parametrize("start", [0, 1, 37, 64, 99])
def test_a_later_start_gives_the_same_weights_from_there_on(
    engine: Engine, whole: np.ndarray, start: int, tolerance: float
):
    blocks = list(engine.attention(TEXT, start=start, block=16))
    assert blocks[0].first == start
    np.testing.assert_allclose(
        watched(engine, start=start, block=16)[:, :, start:], whole[:, :, start:], rtol=0, atol=tolerance
    )


def test_a_part_is_a_part_of_the_whole_in_the_order_asked(engine: Engine, whole: np.ndarray, tolerance: float):
    part = watched(engine, layers=[1, 0], heads=[2, 0])
    np.testing.assert_allclose(part, whole[[1, 0]][:, [2, 0]], rtol=0, atol=tolerance)
    one = watched(engine, layers=engine.attention_layers()[-1:], heads=[1], start=9)
    np.testing.assert_allclose(one[:, :, 9:], whole[-1:, 1:2, 9:], rtol=0, atol=tolerance)


def test_half_precision_is_the_same_rounded(engine: Engine, whole: np.ndarray):
    half = watched(engine, dtype=np.float16)
    assert half.dtype == np.float16
    np.testing.assert_allclose(half, whole.astype(np.float16), rtol=0, atol=1e-3)


def test_blocks_can_be_kept(engine: Engine, whole: np.ndarray, tolerance: float):
    first, *_ = list(engine.attention(TEXT, block=30))
    np.testing.assert_allclose(first.weights, whole[:, :, :30, :30], rtol=0, atol=tolerance)


def test_a_block_that_nobody_keeps_is_gone_before_the_next_is_made(engine: Engine):
    run = engine.attention(TEXT, block=30)
    block = next(run)
    weights = weakref.ref(block.weights)
    del block
    assert weights() is None


def test_one_token_pays_everything_to_itself(engine: Engine):
    assert (watched(engine, [65]) == 1).all()


def test_as_many_tokens_as_the_model_was_trained_for_are_watched_and_no_more(engine: Engine):
    longest = [65] * engine.context_length
    last = list(engine.attention(longest, start=len(longest) - 1, layers=[0]))[-1]
    assert last.weights.shape[-1] == engine.context_length
    with pytest.raises(ContextFull, match=rf"{len(longest) + 1} tokens .* \({engine.context_length}\)"):
        engine.attention([*longest, 65])


def test_a_watched_run_and_a_stream_do_not_disturb_each_other(engine: Engine, whole: np.ndarray, tolerance: float):
    alone, beside = engine.open(Window(budget=20, pins=2)), engine.open(Window(budget=20, pins=2))
    run = engine.attention(TEXT, block=10)
    other = engine.attention(TEXT[::-1], block=10)
    for index, block in enumerate(run):
        next(other)
        given = TEXT[10 * index : 10 * index + 10]
        np.testing.assert_allclose(beside.feed(given), alone.feed(given), rtol=0, atol=tolerance)
        expected = whole[:, :, block.first : block.first + 10, : block.first + 10]
        np.testing.assert_allclose(block.weights, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tokens": []}, "no tokens to watch"),
        ({"tokens": [65, 259]}, "unknown token id 259; ids run from 0 to 258"),
        ({"tokens": [-1]}, "unknown token id -1"),
        ({"layers": [0, 99]}, r"there is no layer 99 to watch; .* shows layers 0-\d"),
        ({"layers": [-1]}, "there is no layer -1"),
        ({"layers": []}, "no layers to watch"),
        ({"layers": [1, 1]}, "layer 1 is named twice"),
        ({"heads": [7]}, r"there is no head 7 to watch; every layer has heads 0-\d"),
        ({"heads": []}, "no heads to watch"),
        ({"heads": [0, 2, 0]}, "head 0 is named twice"),
        ({"start": 100}, "start must be an integer of 0 to 99 .*, got 100"),
        ({"start": -1}, "start must be .*, got -1"),
        ({"block": 0}, "block must be an integer of at least 1 .*, got 0"),
        ({"block": 2.5}, "block must be .*, got 2.5"),
        ({"dtype": np.float64}, "dtype must be numpy.float32 or numpy.float16, got .*float64"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_what_cannot_be_watched_is_refused_before_anything_runs(engine: Engine, options: dict[str, Any], words: str):
    with pytest.raises(UsageError, match=words):
        engine.attention(**{"tokens": TEXT, **options})
