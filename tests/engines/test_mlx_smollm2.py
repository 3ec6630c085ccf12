"""One model, three engines: the same file says the same on MLX, llama.cpp and transformers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from headwater.bench.conversation import load
from headwater.engines import Engine, open_engine
from headwater.engines.llamacpp_examined import divergence
from headwater.policies.window import Window
from tests.llamacpp import require_llamacpp
from tests.mlx import require_mlx

pytestmark = pytest.mark.real_model

SAID = [{"role": "user", "content": "Name three rivers."}]


@pytest.fixture(scope="module")
def smollm2() -> Iterator[Engine]:
    require_mlx()
    engine = open_engine("smollm2", engine="mlx")
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def others() -> Iterator[dict[str, Engine]]:
    require_llamacpp()
    pytest.importorskip("transformers")
    found = {"llamacpp": open_engine("smollm2", engine="llamacpp", n_threads=1), "transformers": open_engine("smollm2")}
    yield found
    for engine in found.values():
        engine.close()


def greedy(engine: Engine, ids: list[int], count: int) -> tuple[list[int], list[np.ndarray]]:
    """The likeliest tokens, one after another, and what was predicted before each."""
    stream = engine.open(Window.of(128, pins=4))
    said, seen = list[int](), [stream.feed(ids)]
    while len(said) < count:
        said.append(int(seen[-1].argmax()))
        seen.append(stream.feed(said[-1:]))
    stream.close()
    return said, seen


def test_the_first_20_greedy_tokens_are_the_same_on_three_engines(smollm2: Engine, others: dict[str, Engine]):
    ids = smollm2.encode(smollm2.render(SAID, open_answer=True), special=True)
    said, seen = greedy(smollm2, ids, 20)
    for name, allowed in (("llamacpp", 0.1), ("transformers", 1e-4)):
        other = others[name]
        assert other.encode(other.render(SAID, open_answer=True), special=True) == ids
        tokens, predicted = greedy(other, ids, 20)
        assert tokens == said, f"{name} parts from MLX at token {next(i for i in range(20) if tokens[i] != said[i])}"
        assert max(divergence(mine, yours) for mine, yours in zip(seen, predicted, strict=True)) < allowed


def test_text_is_that_of_the_other_engines(smollm2: Engine, others: dict[str, Engine]):
    said = " ".join(f"{pair.question} {pair.answer}" for pair in load(None).exchanges)
    sample = said[:3000] + " línea\nnueva 日本語 🙂\ttab 12345 ...  don't ! x" + "\n\n  y <|im_end|>"
    ids = smollm2.encode(sample)
    assert smollm2.decode(ids) == sample
    assert smollm2.stop_tokens <= others["llamacpp"].stop_tokens
    for other in others.values():
        assert other.encode(sample) == ids


def test_past_the_budget_it_holds_and_predicts_what_the_others_do(smollm2: Engine, others: dict[str, Engine]):
    text = smollm2.encode(" ".join(pair.question for pair in load(None).exchanges))[:42]
    window = Window(budget=24, pins=4, block=4)
    ours, theirs = smollm2.open(window), others["transformers"].open(window)
    for start in range(0, 42, 14):
        mine, yours = ours.feed(text[start : start + 14]), theirs.feed(text[start : start + 14])
        assert ours.kept.tolist() == theirs.kept.tolist()
        assert divergence(yours, mine) < 1e-4
    for stream in (ours, theirs):
        stream.close()
