"""The main claim on the real model, run by llama.cpp: with sinks the text holds, without them it falls apart."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from headwater.bench.conversation import load
from headwater.engines import Engine, open_engine
from headwater.engines.llamacpp_examined import divergence
from headwater.policies.window import Window
from tests.llamacpp import require_llamacpp

pytestmark = pytest.mark.real_model


@pytest.fixture(scope="module")
def smollm2() -> Iterator[Engine]:
    require_llamacpp()
    engine = open_engine("smollm2", engine="llamacpp", n_threads=1)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def said() -> str:
    return " ".join(f"{pair.question} {pair.answer}" for pair in load(None).exchanges)


@pytest.fixture(scope="module")
def text(smollm2: Engine, said: str) -> list[int]:
    return smollm2.encode(said)[:400]


def perplexity(engine: Engine, window: Window | None, text: list[int], skip: int = 0, **options: bool) -> float:
    """Over what follows the first 140 tokens, and a gap."""
    stream = engine.open(window, **options)
    stream.feed(text[:140])
    if skip:
        stream.skip(skip)
    scores = stream.score(text[140:])
    stream.close()
    return math.exp(-scores.mean())


def test_a_pure_window_breaks_and_sinks_cure_it(smollm2: Engine, text: list[int]):
    full = perplexity(smollm2, None, text)
    pure = perplexity(smollm2, Window(budget=128, block=64), text)
    sinks = perplexity(smollm2, Window(budget=128, pins=4, block=64), text)
    assert pure > 1.3 * sinks
    assert sinks < 1.5 * full


def test_positions_that_moved_on_change_nothing_when_reindexed_and_ruin_the_text_when_not(
    smollm2: Engine, text: list[int]
):
    window, text = Window(budget=128, pins=4, block=64), text[:260]
    plain = perplexity(smollm2, window, text)
    assert perplexity(smollm2, window, text, 1 << 20) == pytest.approx(plain, rel=1e-3)
    assert perplexity(smollm2, window, text, 65_536, reindex=False) > 5 * plain


def test_a_restored_stream_says_what_the_uninterrupted_one_says(smollm2: Engine, text: list[int], tmp_path: Path):
    """After evictions. Cells lie in another order then, so not to the bit."""
    window = Window.of(200, pins=4)
    stream = smollm2.open(window)
    logits = stream.feed(text[:300])
    saved = stream.save(tmp_path / "s")
    again = smollm2.restore(saved.path, window)
    np.testing.assert_array_equal(again.logits, logits)
    for _ in range(12):
        token = [int(logits.argmax())]
        logits, other = stream.feed(token), again.stream.feed(token)
        assert divergence(logits, other) < 0.02
    again.stream.close()
    stream.close()


def test_text_and_template_are_those_of_the_original_tokenizer(smollm2: Engine, said: str):
    transformers = pytest.importorskip("transformers")
    from headwater.engines.models import path

    original = transformers.AutoTokenizer.from_pretrained(path("smollm2"))
    sample = said[:3000] + " línea\nnueva 日本語 🙂\ttab 12345 ...  don't ! x" + "\n\n  y"
    ids = smollm2.encode(sample)
    assert ids == original.encode(sample, add_special_tokens=False, split_special_tokens=True)
    assert smollm2.decode(ids) == sample
    for messages in (
        [{"role": "user", "content": "HI"}],
        [{"role": "system", "content": "S"}, {"role": "user", "content": "A"}, {"role": "assistant", "content": "B"}],
    ):
        for opened in (True, False):
            expected = original.apply_chat_template(messages, tokenize=False, add_generation_prompt=opened)
            assert smollm2.render(messages, open_answer=opened) == expected
            assert smollm2.encode(expected, special=True) == original.encode(expected, add_special_tokens=False)


def test_the_window_holds_the_same_tokens_on_both_engines_and_their_predictions_are_close(
    smollm2: Engine, text: list[int]
):
    pytest.importorskip("transformers")
    other = open_engine("smollm2")
    window = Window(budget=128, pins=4, block=8)
    ours, theirs = smollm2.open(window), other.open(window)
    for start in range(0, 210, 70):
        mine, dense = ours.feed(text[start : start + 70]), theirs.feed(text[start : start + 70])
        assert ours.kept.tolist() == theirs.kept.tolist()
        assert divergence(dense, mine) < 0.1
    for stream in (ours, theirs):
        stream.close()
    other.close()
