"""The main claim on the real model and real text: without sinks the text falls apart, with sinks it does not."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from headwater.bench.conversation import load
from headwater.engines import Engine, open_engine
from headwater.policies.window import Window

pytestmark = pytest.mark.real_model


@pytest.fixture(scope="module")
def smollm2() -> Iterator[Engine]:
    engine = open_engine("smollm2")
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def text(smollm2: Engine) -> list[int]:
    return smollm2.encode(" ".join(f"{pair.question} {pair.answer}" for pair in load(None).exchanges))[:700]


def perplexity(engine: Engine, window: Window | None, text: list[int]) -> float:
    """Over the last 500 tokens."""
    stream = engine.open(window)
    stream.feed(text[:200])
    scores = stream.score(text[200:])
    stream.close()
    return math.exp(-scores.mean())


def test_a_pure_window_breaks_and_sinks_cure_it(smollm2: Engine, text: list[int]) -> None:
    full = perplexity(smollm2, None, text)
    pure = perplexity(smollm2, Window(budget=128), text)
    sinks = perplexity(smollm2, Window(budget=128, pins=4), text)
    assert pure > 1.4 * sinks
    assert sinks < 1.5 * full


def test_chunks_score_what_single_tokens_score(smollm2: Engine, text: list[int]) -> None:
    """Twenty tokens after the window has slid, on the real model: the mask and the copies of the pins are exact."""
    scores = []
    for size in (1, 20):
        stream = smollm2.open(Window(budget=64, pins=4))
        stream.feed(text[:150])
        scores.append(np.concatenate([stream.score(text[i : i + size]) for i in range(150, 170, size)]))
        stream.close()
    np.testing.assert_allclose(*scores, atol=2e-3)


def test_positions_that_moved_on_change_nothing_when_reindexed_and_ruin_the_text_when_not(
    smollm2: Engine, text: list[int]
) -> None:
    perplexities = {}
    for reindex in (True, False):
        for gap in (0, 65_536):
            stream = smollm2.open(Window.of(128, 4), reindex=reindex)
            stream.feed(text[:200])
            stream.skip(gap)
            perplexities[reindex, gap] = math.exp(-stream.score(text[200:400]).mean())
            stream.close()
    assert perplexities[True, 65_536] == pytest.approx(perplexities[True, 0], rel=1e-3)
    assert perplexities[False, 65_536] > 5 * perplexities[False, 0]


def test_a_restored_stream_says_what_the_uninterrupted_one_says(
    smollm2: Engine, text: list[int], tmp_path: Path
) -> None:
    """200 greedy tokens, saved after the ring has wrapped."""
    window = Window.of(200, pins=4)
    stream = smollm2.open(window)
    logits = stream.feed(text[:600])
    saved = stream.save(tmp_path / "s")
    again = smollm2.restore(saved.path, window)
    np.testing.assert_array_equal(again.logits, logits)
    for _ in range(200):
        token = [int(logits.argmax())]
        logits, other = stream.feed(token), again.stream.feed(token)
        np.testing.assert_array_equal(other, logits)
    again.stream.close()
    stream.close()
