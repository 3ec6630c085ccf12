"""`headwater memory`: what it says, to whom, and with which exit code."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import pytest

from headwater import cli


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADWATER_DATA_DIR", str(tmp_path / "data"))
    return tmp_path / "data"


def called(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(["memory", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_a_document_takes_the_place_of_one_of_its_name(tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "notes.txt"
    file.write_text("The parrot is called Quintus.")
    assert called(capsys, "add", str(file))[1].startswith("notes.txt: 1 pieces; headwater chat --memory")
    file.write_text("The parrot is called Sextus. " * 60)
    assert called(capsys, "add", str(file))[1].startswith("notes.txt: 2 pieces, in the place of 1;")
    assert called(capsys, "add", str(file), "--name", "bird")[1].startswith("bird: 2 pieces;")
    assert called(capsys, "list") == (0, "DOCUMENT   PIECES\nbird       2\nnotes.txt  2\n", "")
    code, out, _ = called(capsys, "search", "the parrot", "--limit", "1")
    assert code == 0
    assert out.count("Sextus") > 20
    assert "Quintus" not in out


def test_a_file_or_name_that_cannot_be_used_is_wrong_usage(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "photo.png").write_bytes(b"\x89PNG\r\n")
    code, out, err = called(capsys, "add", str(tmp_path / "photo.png"))
    assert (code, out) == (2, "")
    assert "photo.png is not a UTF-8 text: invalid start byte at byte 0" in err
    code, _, err = called(capsys, "forget", "nothing")
    assert code == 2
    assert "unknown document 'nothing'" in err
    assert called(capsys, "list") == (0, "", "No documents yet; headwater memory add FILE indexes one.\n")


def test_a_file_name_that_is_not_text_has_a_name(tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]):
    path = os.fsencode(tmp_path) + b"/caf\xe9.txt"
    try:
        Path(os.fsdecode(path)).write_text("The parrot is called Quintus.")
    except OSError:
        pytest.skip("this file system takes names of UTF-8 only")
    assert called(capsys, "add", os.fsdecode(path))[1].startswith("caf\ufffd.txt: 1 pieces")
    assert called(capsys, "forget", "caf\ufffd.txt")[1].startswith("caf\ufffd.txt is forgotten")


def test_vectors_that_are_made_again_are_told(tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "notes.txt").write_text("The parrot is called Quintus.")
    assert called(capsys, "add", str(tmp_path / "notes.txt"))[0] == 0
    connection = sqlite3.connect(data / "headwater.db")
    connection.execute("UPDATE passages SET vector = x'00'")
    connection.commit()
    connection.close()
    code, out, err = called(capsys, "search", "name of the bird")
    assert (code, err) == (0, "passages with damaged vectors: 1; made again from the texts\n")
    assert "Quintus" in out
    assert called(capsys, "search", "name of the bird") == (0, out, "")
