"""Which whole exchanges leave."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.chat.ledger import Ledger, Turn, leaving


def turns(*lengths: int, start: int = 10) -> list[Turn]:
    out: list[Turn] = []
    for index, length in enumerate(lengths):
        out.append(Turn(role=("user", "assistant")[index % 2], text="", start=start, stop=start + length))
        start += length
    return out


TALK = turns(5, 7, 6, 4, 9, 3)  # exchanges at 10-22, 22-32, 32-44


@pytest.mark.parametrize(
    ("first", "need", "stop"),
    [
        (10, 0, None),  # nothing has to go
        (10, 1, 22),  # never half an exchange
        (10, 12, 22),
        (10, 13, 32),
        (22, 1, 32),  # the first is gone already
        (26, 6, 32),  # the rest of one that was cut
        (26, 7, 44),
        (10, 99, 44),  # all there are, although it is not enough
        (44, 1, None),
    ],
)
def test_oldest_exchanges_leave_first(first: int, need: int, stop: int | None):
    gone = leaving(TALK, first=first, need=need)
    assert (gone[-1].stop if gone else None) == stop
    assert len(gone) % 2 == 0


def test_a_message_without_its_answer_stays():
    assert leaving(TALK[:5], first=32, need=5) == ()
    assert leaving(TALK[:5], first=10, need=99) == tuple(TALK[:4])


def test_sinks_inside_the_first_turn_stay():
    assert leaving(TALK, first=14, need=8)[-1].stop == 22
    assert leaving(TALK, first=14, need=9)[-1].stop == 32


@given(st.lists(st.integers(1, 20), max_size=30), st.integers(0, 500), st.integers(0, 400))
def test_what_leaves_is_the_shortest_run_that_is_enough(lengths: list[int], first: int, need: int):
    talk = turns(*lengths)
    gone = leaving(talk, first=first, need=need)
    closed = talk[: len(talk) // 2 * 2]
    alive = [pair for pair in zip(closed[::2], closed[1::2], strict=True) if pair[1].stop > first]
    expected: list[Turn] = []
    for pair in alive:
        if need <= 0 or (expected and expected[-1].stop - first >= need):
            break
        expected.extend(pair)
    assert list(gone) == expected


def test_ids_by_position():
    ledger = Ledger()
    ledger.add(range(100, 120))
    assert ledger.held(3, 15).tolist() == [100, 101, 102, 115, 116, 117, 118, 119]
    ledger.take_back(3)
    assert len(ledger) == 17
    assert ledger.held(0, 15).tolist() == [115, 116]
    assert ledger.held(4, 2).tolist() == list(range(100, 117))


def test_turns_that_ended_are_counted():
    ledger = Ledger(turns=TALK)
    assert [ledger.gone_turns(first) for first in (10, 14, 15, 21, 22, 44)] == [0, 0, 1, 1, 2, 6]
