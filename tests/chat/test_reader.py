"""Pieces of an answer: whole characters, never a part of a stop string, nothing lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.chat.reader import Reader, checked_stops
from headwater.engines.fake import FakeEngine
from headwater.errors import UsageError

ENGINE = FakeEngine()


def read(data: bytes, stop: tuple[str, ...] = ()) -> tuple[list[str], Reader]:
    reader = Reader(ENGINE.decode, stop)
    pieces = []
    for token in data:
        pieces.append(reader.push(token))
        if reader.stopped:
            break
    return [*pieces, reader.flush()], reader


def test_a_character_comes_whole_with_its_last_byte():
    pieces, _ = read("aé日🙂".encode())
    assert pieces == ["a", "", "é", "", "", "日", "", "", "", "🙂", ""]


@given(st.text(max_size=80))
def test_the_pieces_are_the_text(text: str):
    pieces, _ = read(text.encode())
    assert "".join(pieces) == text
    assert all(piece.encode() for piece in pieces if piece)


@given(st.binary(max_size=80))
def test_broken_bytes_come_out_as_they_decode(data: bytes):
    pieces, _ = read(data)
    assert "".join(pieces) == ENGINE.decode(list(data))


@given(st.text("abAB", max_size=60), st.lists(st.text("abAB", min_size=1, max_size=5), min_size=1, max_size=3))
def test_nothing_of_a_stop_string_is_ever_given_out(text: str, stops: list[str]):
    pieces, reader = read(text.encode(), tuple(stops))
    # The first stop string to be complete ends the answer; of several that complete together, the one that began first.
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    seen = text[: min(ends)] if ends else text
    begins = [seen.find(stop) for stop in stops if stop in seen]
    assert "".join(pieces) == (text[: min(begins)] if begins else text)
    assert reader.stopped == bool(begins)


def test_a_stop_string_says_which_tokens_are_surplus():
    pieces, reader = read(b"ok STOP and more", (" STOP",))
    assert "".join(pieces) == "ok"
    assert reader.surplus == len(" STOP")


def test_a_false_start_of_a_stop_string_is_given_out():
    pieces, reader = read(b"a STO b", (" STOP",))
    assert pieces == ["a", "", "", "", "", " STO", " b", ""]
    assert not reader.stopped


def test_a_start_of_a_stop_string_at_the_end_is_given_out():
    pieces, _ = read(b"ok ST", (" STOP",))
    assert "".join(pieces) == "ok ST"


@pytest.mark.parametrize("stop", [("",), ("ok", ""), ""])
def test_an_empty_stop_string_is_refused(stop: tuple[str, ...] | str):
    with pytest.raises(UsageError, match="at least one character"):
        checked_stops(stop)


def test_one_stop_string_may_be_given_as_text():
    assert checked_stops("END") == ("END",)
