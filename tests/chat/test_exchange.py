"""Sessions out to text and in again, and what verify finds."""

from __future__ import annotations

import json
import re
import sqlite3
from pathlib import Path

import pytest

from headwater.chat.exchange import LONGEST_MESSAGE, as_json_lines, as_markdown, faults_of, import_json_lines
from headwater.chat.session import Chat
from headwater.chat.store import Opened, Store
from headwater.engines.fake import FakeEngine
from headwater.errors import InputFileError, UsageError
from tests.chat.talk import said
from tests.chat.test_sessions import opened, talked


@pytest.fixture
def file(tmp_path: Path) -> Path:
    chat = opened(tmp_path / "talk.db")
    talked(chat, 5)
    chat.set_system("Be é\nlong.")
    said(chat, "nul \0 and 日本")
    chat.close()
    return tmp_path / "talk.db"


def taken(file: Path, name: str = "talk") -> Opened:
    return Store(file).open(name, create=False)


def test_what_goes_out_comes_in(file: Path):
    first = taken(file)
    lines = list(as_json_lines(first))
    first.close()
    count = import_json_lines(Store(file), "again", [line.encode() for line in lines], "x.jsonl")
    assert count == 12
    second = taken(file, "again")
    mine = [json.loads(line) for line in as_json_lines(second)]
    second.close()
    kept = ("chapter", "system", "role", "content", "time", "finished")
    assert [{key: each.get(key) for key in kept} for each in mine] == [
        {key: json.loads(line).get(key) for key in kept} for line in lines
    ]


def test_an_imported_session_is_read_and_gone_on_with(tmp_path: Path):
    lines = [json.dumps({"role": role, "content": f"text {n}"}) for n in range(40) for role in ("user", "assistant")]
    lines.insert(0, json.dumps({"role": "system", "content": "Be brief."}))
    import_json_lines(Store(tmp_path / "x.db"), "x", [line.encode() for line in lines], "x.jsonl")
    chat = Chat.open(FakeEngine(), session=tmp_path / "x.db", budget=200)
    assert chat.system == "Be brief."
    assert [message["content"] for message in chat.messages[1:]] == [f"text {n // 2}" for n in range(80)]
    whole = chat.engine.encode(chat.engine.render(chat.messages, open_answer=False), special=True)
    assert chat._talk.ledger.ids.tolist() == whole[chat._talk.ledger.base :]
    said(chat)
    chat.close()
    again = taken(tmp_path / "x.db", "x")
    assert faults_of(again) == []
    again.close()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"{", "line 3 is not JSON"),
        (b"\xff", "line 3 is not JSON"),
        (b"[1]", "line 3 is not an object"),
        (b'{"role": "assistant", "content": "x"}', "line 3: the role is 'assistant' where 'user' comes next"),
        (b'{"role": "tool", "content": "x"}', "line 3: the role is 'tool'"),
        (b'{"role": "user", "content": 7}', "line 3: the content is 7, not a text"),
        (b'{"role": "user"}', "line 3: the content is None"),
        (b'{"role": "user", "content": "\\ud800"}', "line 3: the content is not valid text: character 1"),
        (
            json.dumps({"role": "user", "content": "x" * (LONGEST_MESSAGE + 1)}).encode(),
            "line 3: the content has 1,000,001 characters; at most 1,000,000",
        ),
        (b'{"role": "user", "content": "x"}', "the last message of a conversation is the user's"),
        (b'{"chapter": 2, "system": 5}', "line 3: the system prompt is 5"),
    ],
)
def test_a_broken_line_is_named_and_nothing_is_kept(tmp_path: Path, line: bytes, words: str):
    store = Store(tmp_path / "x.db")
    good = [b'{"role": "user", "content": "a"}', b'{"role": "assistant", "content": "b"}']
    with pytest.raises(InputFileError, match=words):
        import_json_lines(store, "x", [*good, line], "x.jsonl")
    assert store.list() == []


def test_an_empty_file_or_a_name_that_is_taken_is_refused(file: Path):
    with pytest.raises(InputFileError, match="holds no message"):
        import_json_lines(Store(file), "x", [b"", b"\n"], "x.jsonl")
    with pytest.raises(UsageError, match="there is a session 'talk' already"):
        import_json_lines(Store(file), "talk", [], "x.jsonl")
    assert [each.name for each in Store(file).list()] == ["talk"]


def test_markdown_is_for_people(file: Path):
    first = taken(file)
    text = "\n\n".join(as_markdown(first))
    first.close()
    assert text.startswith("# talk\n\n*System prompt:* You are brief.\n\n**user**, 20")
    assert "## Conversation 2\n\n*System prompt:* Be é\nlong." in text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("DELETE FROM turns WHERE chapter = 1 AND number = 3", "conversation 1, message 3 is missing"),
        ("UPDATE turns SET role = 'user' WHERE chapter = 1 AND number = 1", "message 1 is the user's, out of turn"),
        ("UPDATE turns SET ids = x'00000000' WHERE chapter = 1 AND number = 2", "message 2: its tokens do not follow"),
        ("UPDATE turns SET stop = stop + 1 WHERE chapter = 2 AND number = 0", "conversation 2, message 0"),
    ],
)
def test_verify_names_what_is_wrong(file: Path, change: str, words: str):
    first = taken(file)
    assert faults_of(first) == []
    first.close()
    connection = sqlite3.connect(file)
    connection.execute(change)
    connection.commit()
    connection.close()
    second = taken(file)
    assert words in "\n".join(faults_of(second))
    second.close()


def test_verify_finds_a_damaged_snapshot(file: Path):
    first = taken(file)
    content = bytearray(first.snapshot.read_bytes())
    content[len(content) // 2] ^= 4
    first.snapshot.write_bytes(content)
    assert re.search(r"is damaged: its digest is \w+, and its content gives \w+; it will be made", faults_of(first)[0])
    first.close()
