"""Which session a history belongs to: by hand, case by case, and against a slow twin."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.server.history import MOST_HEARD, Exchange, History, Known, Match, exchanges_of
from tests.reference.known import SlowKnown


def talk(text: str) -> tuple[Exchange, ...]:
    """`abc` is three exchanges; `b'` is one whose answer is another."""
    words = text.replace("'", " '").split() if " " in text else [c for c in text if c != "'"]
    marks = [text[i + 1 : i + 2] == "'" for i, c in enumerate(text) if c != "'"]
    return tuple(Exchange(question=w, answer=f"{w}, indeed{'!' * m}") for w, m in zip(words, marks, strict=True))


def history(text: str, *, system: str | None = "s", lone: str | None = None) -> History:
    return History(system=system, exchanges=talk(text), lone_answer=lone)


def known(*sessions: str, system: str | None = "s") -> Known:
    """Sessions called after what was said in them."""
    out = Known()
    for name in sessions:
        out.begin(name, system)
        for exchange in talk(name):
            out.said(name, exchange)
    return out


CASES = [
    # nothing said, or something else: a new session
    (["abc"], "", ("new", None, 0, 0)),
    (["abc"], "x", ("new", None, 0, 0)),
    ([], "abc", ("new", None, 0, 0)),
    # the whole chain: it goes on
    (["abc"], "abc", ("continued", "abc", 3, 0)),
    (["abc", "abd"], "abd", ("continued", "abd", 3, 0)),
    # an exchange that was had elsewhere: the session is told of it
    (["abc"], "abcd", ("continued", "abc", 3, 0)),
    # the last message again, or another one in its place
    (["abc"], "ab", ("edited", "abc", 2, 1)),
    # the last answer is another one
    (["abc"], "abc'", ("edited", "abc", 2, 1)),
    # the last answer but one, and an answer more
    (["abcd"], "abc'd", ("edited", "abcd", 2, 2)),
    # a common opening is not worth the end of a long conversation
    (["abcdef"], "ab", ("new", None, 0, 0)),
    (["abcdef"], "abc", ("edited", "abcdef", 3, 3)),
    (["abcdef"], "a", ("new", None, 0, 0)),
    (["ab"], "a", ("edited", "ab", 1, 1)),
    # the oldest ones are left out
    (["abcde"], "cde", ("shortened", "abcde", 3, 0)),
    (["abcde"], "de", ("shortened", "abcde", 2, 0)),
    (["abcde"], "e", ("new", None, 0, 0)),  # too little to know it by
    (["abcde"], "bcd", ("shortened", "abcde", 3, 1)),  # and the last message again
    (["abcde"], "abde", ("shortened", "abcde", 4, 0)),  # some after the first ones
    (["abcde"], "acde", ("shortened", "abcde", 4, 0)),
    (["abcde"], "xcde", ("new", None, 0, 0)),  # something else before them
    (["abcde"], "ced", ("new", None, 0, 0)),
    # two that it could be: neither
    (["abcde", "xycde"], "cde", ("new", None, 0, 0)),
    # a session of its own goes before one that merely ends alike
    (["abcde", "cde"], "cde", ("continued", "cde", 3, 0)),
    # of those that began alike, the one with the least after it
    (["abcde", "abcx"], "abc", ("edited", "abcx", 3, 1)),
]


@pytest.mark.parametrize(("sessions", "asked", "expected"), CASES, ids=lambda value: str(value))
def test_by_hand(sessions: list[str], asked: str, expected: tuple[Any, ...]):
    how, session, count, back = expected
    assert known(*sessions).match(history(asked)) == Match(how=how, session=session, known=count, take_back=back)


def test_another_system_prompt_is_another_conversation():
    assert known("abc").match(history("abc", system=None)).how == "new"
    assert known("abc").match(history("abc", system="t")).how == "new"
    assert known("abcde").match(history("cde", system="t")).how == "new"
    assert known("abc", system=None).match(history("abc", system="")).how == "new"


def test_white_space_around_a_message_does_not_tell_it_apart():
    asked = History(system=" s\n", exchanges=tuple(exchanges_of([" a", "a, indeed \n"])))
    assert known("a").match(asked).session == "a"


def test_where_a_message_ends_matters():
    one = known()
    one.begin("x", None)
    one.said("x", Exchange(question="ab", answer="c"))
    asked = History(system=None, exchanges=exchanges_of(["a", "bc"]))
    assert one.match(asked).how == "new"


def test_an_answer_without_its_message():
    """A client that leaves out one message at a time begins with an answer now and then."""
    asked = history("cd", lone="b, indeed")
    assert known("abcd").match(asked) == Match(how="shortened", session="abcd", known=2, take_back=0)
    assert known("abcd").match(history("cd", lone="x")).how == "new"
    assert known("cd").match(asked).how == "new"
    assert known("abcd").match(history("abcd", lone="x")).how == "new"


def test_one_that_is_busy_is_not_disturbed():
    both = known("abc")
    assert both.match(history("abc"), busy={"abc"}).how == "new"
    both.begin("other", "s")
    for exchange in talk("abc"):
        both.said("other", exchange)
    assert both.match(history("abc"), busy={"abc"}).session == "other"
    assert known("abcde").match(history("cde"), busy={"abcde"}).how == "new"


def test_of_two_alike_the_one_used_last():
    both = Known()
    for name in ("first", "second"):
        both.begin(name, "s")
        both.said(name, *talk("a"))
    assert both.match(history("a")).session == "second"
    both.touch("first")
    assert both.match(history("a")).session == "first"


@pytest.mark.parametrize(
    ("part", "how"), [("so far, so", "edited"), ("", "edited"), ("so far, so good!", "new"), ("s0", "new")]
)
def test_a_first_answer_that_the_client_left(part: str, how: str):
    one = Known()
    one.begin("one", "s")
    one.said("one", Exchange(question="a", answer="so far, so good"), cut=True)
    asked = History(system="s", exchanges=(Exchange(question="a", answer=part),))
    expected = Match(how="edited", session="one", known=0, take_back=1) if how == "edited" else Match(how="new")
    assert one.match(asked) == expected
    assert one.match(asked, busy={"one"}).how == "new"
    assert one.match(History(system=None, exchanges=asked.exchanges)).how == "new"
    one.said("one", *talk("b"))
    assert one.match(asked).how == "new", "it went on as it was"


def test_what_was_taken_back_is_not_known_any_more():
    one = known("abc")
    one.take_back("abc", 1)
    assert one.match(history("ab")) == Match(how="continued", session="abc", known=2)
    assert one.match(history("abc")) == Match(how="continued", session="abc", known=2)
    one.said("abc", *talk("x"))
    assert one.match(history("abx")).known == 3


def test_what_was_forgotten_leaves_nothing():
    one = known("abc", "de")
    one.begin("x", None)
    one.said("x", Exchange(question="c", answer="so far"), cut=True)
    for name in ("abc", "de", "nobody", "x"):
        one.forget(name)
    assert len(one) == 0
    assert (one._at, one._ends, one._cut) == ({}, {}, {})
    assert one.match(history("abc")).how == "new"


def test_a_history_with_much_that_is_new_is_a_new_one():
    letters = "abcdefghijklmnop"
    assert known("a").match(history(letters[: 1 + MOST_HEARD])).how == "continued"
    assert known("a").match(history(letters[: 2 + MOST_HEARD])).how == "new"


# Named.

NAMED = [
    ("abc", "abc", "continued"),
    ("abc", "", "continued"),  # the server has the rest
    ("abc", "ab", "edited"),
    ("abcde", "cde", "shortened"),
    ("abc", "xyz", None),
    ("abc", "c", None),
]


@pytest.mark.parametrize(("session", "asked", "how"), NAMED)
def test_a_session_that_is_named(session: str, asked: str, how: str | None):
    both = known(session, "xyz")
    found = both.match_named(session, history(asked))
    assert (None if found is None else found.how) == how
    assert found is None or found.session == session


def test_a_named_session_keeps_its_system_prompt():
    one = known("abc")
    assert one.match_named("abc", history("abc", system=None)) == Match(how="continued", session="abc", known=3)
    assert one.match_named("abc", history("", system=None)) == Match(how="continued", session="abc")
    assert one.match_named("abc", history("", system="t")) is None
    assert one.match_named("abc", history("", system="s")) == Match(how="continued", session="abc")


@pytest.mark.parametrize(
    ("asked", "count", "back"), [("", 0, 3), ("a", 1, 2), ("x", 0, 3), ("abc", 3, 0), ("abcd", 3, 0), ("ax", 1, 2)]
)
def test_the_whole_history_of_a_session_that_is_named(asked: str, count: int, back: int):
    how = "edited" if back else "continued"
    expected = Match(how=how, session="abc", known=count, take_back=back)
    assert known("abc", "xyz").match_named("abc", history(asked), whole=True) == expected
    assert known("abc").match_named("abc", history(asked, system=None), whole=True) is None


# All of them.


def test_every_history_of_up_to_four_exchanges_against_the_slow_twin():
    """Two sessions of every make over two messages; every history over two messages and three ways to end."""
    chains = ["".join(parts) for length in range(5) for parts in itertools.product("ab", repeat=length)]
    for first, second in itertools.product(chains[::3], chains):
        fast, slow = Known(), SlowKnown()
        for each in (fast, slow):
            for name, said in (("first", first), ("second", second)):
                each.begin(name, "s")
                for exchange in talk(said):
                    each.said(name, exchange)
        for asked in chains:
            assert fast.match(history(asked)) == slow.match(history(asked)), (first, second, asked)


steps = st.lists(
    st.tuples(
        st.sampled_from(
            ["begin", "say", "say", "say", "cut", "take back", "forget", "touch", "match", "match", "lone"]
        ),
        st.integers(0, 3),
        st.sampled_from(["a", "b", "a'", "bb"]),
        st.lists(st.sampled_from("aab"), max_size=6),
    ),
    max_size=60,
)


@given(steps)
def test_any_course_of_sessions_against_the_slow_twin(course: list[tuple[str, int, str, list[str]]]):
    fast, slow = Known(), SlowKnown()
    for step, number, text, asked in course:
        name = f"session {number}"
        there = name in slow.sessions
        if step == "begin":
            for each in (fast, slow):
                each.begin(name, "s" if number else None)
        elif step in ("say", "cut") and there:
            exchange = Exchange(question=text[0], answer=text * 3)
            for each in (fast, slow):
                each.said(name, exchange, cut=step == "cut")
        elif step == "take back" and there and slow.sessions[name].said:
            for each in (fast, slow):
                each.take_back(name, min(2, len(slow.sessions[name].said)))
        elif step == "forget" and there:
            fast.forget(name)
            slow.forget(name)
        elif step == "touch" and there:
            fast.touch(name)
            slow.touch(name)
        else:
            said = tuple(Exchange(question=c, answer=c * (2 if text == "a'" else 3)) for c in asked)
            request = History(
                system="s" if number else None, exchanges=said, lone_answer="aaa" if step == "lone" else None
            )
            busy = {name} if text == "bb" else set()
            assert fast.match(request, busy=busy) == slow.match(request, busy=busy)
