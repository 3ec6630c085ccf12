"""Reading conversations: the formats, and every way in which a file can be wrong, with its line."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from headwater.bench.conversation import Conversation, Exchange, load, parse
from headwater.errors import InputFileError, UsageError

HELLO = '{"role": "user", "content": "Hello"}'
HI = '{"role": "assistant", "text": "Hi"}'


def test_the_bundled_conversation_is_whole_and_says_where_it_comes_from() -> None:
    told = load(None)
    assert told.name == "multiwoz-01"
    assert told.turns == 202
    assert told.exchanges[0].question == "I want something to entertain me in town. What do you have?"
    assert "MultiWOZ 2.1" in told.attribution and "MIT" in told.attribution
    assert told.choices == ()


def test_the_licence_of_the_bundled_conversation_ships_with_it() -> None:
    import headwater.data

    folder = Path(headwater.data.__file__).parent
    assert "Budzianowski" in (folder / "LICENSE-MultiWOZ.txt").read_text(encoding="utf-8")


def test_json_lines_take_content_or_text_and_skip_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "talk.jsonl"
    raw = f'{{"role": "system", "content": "Be brief."}}\n\n{HELLO}\r\n{HI}\n'.encode()
    path.write_bytes(raw)
    assert load(path) == Conversation(
        name="talk",
        sha256=hashlib.sha256(raw).hexdigest(),
        exchanges=(Exchange(question="Hello", answer="Hi"),),
        system="Be brief.",
    )


def test_one_object_with_turns_is_a_conversation_in_json_and_in_json_lines() -> None:
    session = {"source": "somewhere", "turns": [json.loads(HELLO), json.loads(HI)]}
    for raw, name in ((json.dumps(session, indent=1), "a.json"), (json.dumps(session), "a.jsonl")):
        told = parse(raw.encode(), name)
        assert told.exchanges == (Exchange(question="Hello", answer="Hi"),)
        assert told.attribution == "somewhere"


def test_a_byte_order_mark_is_not_part_of_the_text() -> None:
    assert parse(b"\xef\xbb\xbf" + f"{HELLO}\n{HI}".encode(), "a.jsonl").exchanges[0].question == "Hello"


def test_paragraphs_of_plain_text_alternate_and_the_choice_is_told() -> None:
    told = parse(b"Hello\nthere\n\n\nHi\n\nBye\n\nBye!\n", "a.txt")
    assert told.exchanges == (Exchange(question="Hello\nthere", answer="Hi"), Exchange(question="Bye", answer="Bye!"))
    assert "paragraphs alternate" in told.choices[0]


def test_plain_text_that_looks_like_json_stays_plain_text_by_its_suffix() -> None:
    assert parse(b"{one}\n\n{two}", "a.md").exchanges == (Exchange(question="{one}", answer="{two}"),)


def test_a_last_message_without_an_answer_is_left_out_and_told() -> None:
    told = parse(f"{HELLO}\n{HI}\n{HELLO}".encode(), "a.jsonl")
    assert told.turns == 2
    assert told.choices == ("the last message (line 3) has no answer and is left out",)


BAD = [
    # file, bytes, what the message names
    ("a.jsonl", b'{"role": "user", "content": "a"}\n\xff\xfe', "a.jsonl, line 2: not UTF-8"),
    ("a.jsonl", f"{HELLO}\nnot json".encode(), "a.jsonl, line 2: not JSON"),
    ("a.json", b'{"turns": [\n{"role": "user",}]}', "a.json, line 2: not JSON"),
    ("a.jsonl", b"[" * 100_000, "a.jsonl, line 1: not JSON"),
    (
        "a.jsonl",
        f'{HELLO}\n{{"role": "bot", "content": "x"}}'.encode(),
        "line 2: unknown role 'bot'; known: assistant, sys",
    ),
    ("a.jsonl", b'{"content": "x"}', "line 1: unknown role None"),
    ("a.jsonl", f'{HELLO}\n{{"role": "assistant"}}'.encode(), "line 2: a message has its text in one of"),
    ("a.jsonl", b'{"role": "user", "text": "a", "content": "b"}', "line 1: a message has its text in one of"),
    ("a.jsonl", b'{"role": "user", "text": " "}', "line 1: the text is missing"),
    ("a.jsonl", b'{"role": "user", "text": ["a"]}', "line 1: the text is missing"),
    ("a.jsonl", b'{"role": "user", "text": "\\ud800"}', "line 1: the text holds half of a surrogate pair"),
    ("a.jsonl", b'"hello"', "line 1: a message must be an object"),
    ("a.jsonl", f"{HELLO}\n{HELLO}".encode(), "line 2: expected a message of the assistant"),
    ("a.jsonl", f"{HI}\n{HELLO}".encode(), "line 1: expected a message of the user"),
    ("a.jsonl", f'{HELLO}\n{HI}\n{{"role": "system", "text": "x"}}'.encode(), "line 3: expected a message of the user"),
    ("a.jsonl", b"\n\n", "a.jsonl: the conversation is empty"),
    ("a.jsonl", HELLO.encode(), "a.jsonl: the conversation is empty"),
    ("a.txt", b"   \n", "a.txt: the conversation is empty"),
    ("a.json", b'{"messages": 1}', "a.json, line 1: a list of messages is missing"),
    ("a.json", b'{"turns": [{"role": "user", "text": "a"}, {"role": "x"}]}', "a.json, turn 2: unknown role 'x'"),
    ("a.jsonl", b'{"turns": []}\n{"turns": []}', "a.jsonl, line 2: a second conversation"),
]


@pytest.mark.parametrize(("name", "raw", "said"), BAD, ids=[said for _, _, said in BAD])
def test_a_bad_file_is_refused_with_its_line(name: str, raw: bytes, said: str) -> None:
    with pytest.raises(InputFileError) as caught:
        parse(raw, name)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match=r"gone\.jsonl: cannot be read \(No such file"):
        load(tmp_path / "gone.jsonl")


def test_the_first_turns_are_whole_exchanges_and_the_cut_is_told() -> None:
    told = load(None).first(31)
    assert told.turns == 30
    assert told.choices == ("the first 30 of 202 turns",)
    assert load(None).first(1000) == load(None)
    with pytest.raises(UsageError, match="at least 2"):
        load(None).first(1)
