"""Lines broken between words, whatever pieces the text comes in."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from headwater.chat.wrap import Wrapper

TEXT = st.text(st.sampled_from(list("ab é日本  \n")), max_size=120)


def wrapped(text: str, width: int, cuts: int = 1) -> str:
    wrapper = Wrapper(width)
    return "".join(wrapper.push(text[i : i + cuts]) for i in range(0, len(text), cuts)) + wrapper.finish()


def test_words_move_to_the_next_line_whole():
    assert wrapped("the sea is a cruel mistress", 10) == "the sea is\na cruel\nmistress"


def test_text_that_fits_is_left_alone():
    assert wrapped("def f(x):\n    return x\n", 40) == "def f(x):\n    return x\n"


def test_a_word_comes_with_the_space_after_it():
    wrapper = Wrapper(40)
    assert [wrapper.push(piece) for piece in ("the", " se", "a", " is")] == ["", "the", "", " sea"]
    assert wrapper.finish() == " is"


def test_text_without_spaces_does_not_wait():
    wrapper = Wrapper(6)
    assert [wrapper.push(letter) for letter in "日本語東"] == ["日", "本", "語", "\n東"]
    assert wrapped("see " + "x" * 100, 10) == "see\n" + "x" * 100


@given(TEXT, st.integers(2, 30), st.integers(1, 9))
def test_no_line_is_too_wide_and_no_letter_is_lost(text: str, width: int, cuts: int):
    out = wrapped(text, width, cuts)
    assert out == wrapped(text, width)
    assert "".join(out.split()) == "".join(text.split())
    for line in out.split("\n"):
        assert cell_len(line) <= width or len(line.split()) == 1
