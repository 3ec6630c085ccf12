"""What the fake engine promises beyond the contract: determinism, sensitivity, answers that look like words and end."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.engines import open_engine
from headwater.engines.base import Engine
from headwater.engines.fake import TURN_END, VOCABULARY, FakeEngine
from headwater.errors import UnsupportedModel, UsageError
from headwater.policies.window import Window


def answer(engine: Engine, question: str, limit: int = 1000) -> str:
    stream = engine.open(Window(budget=200))
    text = engine.render([{"role": "user", "content": question}], open_answer=True)
    logits, out = stream.feed(engine.encode(text, special=True)), []
    while len(out) < limit and (token := int(logits.argmax())) not in engine.stop_tokens:
        out.append(token)
        logits = stream.feed([token])
    return engine.decode(out)


@pytest.mark.parametrize("question", ["hi", "how are you?", "tell me a story", ""])
def test_answers_are_short_words_that_end(question: str):
    text = answer(FakeEngine(), question)
    assert re.fullmatch(r"[a-z ]+", text)
    assert max(map(len, text.split())) <= 6
    assert len(text) <= 4 * 24


def test_answers_can_be_endless():
    assert len(answer(FakeEngine(answer_tokens=None), "hi", limit=400)) == 400


def test_the_same_input_gives_the_same_answer_in_every_process():
    assert answer(FakeEngine(), "hi") == "cocuri la"


@given(st.lists(st.integers(0, VOCABULARY - 1), min_size=2, max_size=12), st.data())
def test_any_other_held_token_changes_the_logits(tokens: list[int], data: st.DataObject):
    index = data.draw(st.integers(0, len(tokens) - 1))
    other = list(tokens)
    other[index] = (tokens[index] + data.draw(st.integers(1, VOCABULARY - 1))) % VOCABULARY
    first, second = (FakeEngine().open(None).feed(ids) for ids in (tokens, other))
    assert not np.array_equal(first, second)


@given(st.lists(st.integers(0, VOCABULARY - 1), min_size=2, max_size=12, unique=True))
def test_order_and_position_change_the_logits(tokens: list[int]):
    engine = FakeEngine()
    plain = engine.open(None).feed(tokens)
    assert not np.array_equal(plain, engine.open(None).feed([tokens[1], tokens[0], *tokens[2:]]))
    moved = engine.open(Window(budget=100))
    moved.feed([65])
    moved.evict(1)
    assert not np.array_equal(plain, moved.feed(tokens))


def test_held_tokens_are_shown_in_the_order_of_kept():
    stream = FakeEngine().open(Window(budget=4, pins=1))
    stream.feed([10, 11, 12, 13, 14, 15])
    assert stream.tokens == [10, 13, 14, 15]
    assert stream.kept.tolist() == [0, 3, 4, 5]


def test_the_template_is_chatml():
    engine = FakeEngine(default_system="Be brief.")
    assert engine.render([{"role": "user", "content": "hi"}], open_answer=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    with pytest.raises(UnsupportedModel, match="'tool'; known: system, user, assistant"):
        engine.render([{"role": "tool", "content": "x"}], open_answer=False)


def test_it_loads_by_name_and_refuses_unknown_options():
    engine = open_engine("anything", engine="fake", answer_tokens=3)
    assert engine.name == "anything"
    with pytest.raises(UsageError, match="no option 'dtype'; known: context_length"):
        open_engine("anything", engine="fake", dtype="bf16")


def test_control_tokens_decode_to_nothing():
    assert FakeEngine().decode([104, TURN_END, 105]) == "hi"


def test_numbers_below_one_are_refused():
    with pytest.raises(UsageError, match="context_length must be at least 1"):
        FakeEngine(context_length=0)
    with pytest.raises(UsageError, match="answer_tokens must be at least 1"):
        FakeEngine(answer_tokens=0)


def test_text_that_is_not_unicode_is_refused():
    with pytest.raises(UsageError, match="character 1"):
        FakeEngine().encode("a\ud800")
