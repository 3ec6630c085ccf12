"""The commands `serve` and `keys`: what the library is handed, and what is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headwater import cli
from headwater.server import serve
from headwater.server.keys import Keys, server_dir
from headwater.server.limits import Limits


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADWATER_DATA_DIR", str(tmp_path))
    return tmp_path


def called(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(arguments)
    out, err = capsys.readouterr()
    return code, out, err


def test_serve_hands_over_what_was_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    handed: dict[str, Any] = {}

    def record(**options: Any) -> int:
        handed.update(options)
        return 0

    monkeypatch.setattr(serve, "run", record)
    arguments = "--port 0 --budget 99 --memory --memory-limit 1.5GiB --timeout 5 --sessions 7 --allow-host box"
    code, out, err = called(capsys, "serve", "--engine", "fake", "--allow-origin", "http://a:1", *arguments.split())
    assert (code, out, err) == (0, "", "")
    assert handed == {
        "model": "smollm2",
        "engine": "fake",
        "host": "127.0.0.1",
        "port": 0,
        "policy": "streaming-llm",
        "budget": 99,
        "sinks": None,
        "max_tokens": 512,
        "memory": True,
        "memory_bytes": 3 << 29,
        "timeout_s": 5.0,
        "origins": ("http://a:1",),
        "hosts": ("box",),
        "limits": Limits(sessions=7),
    }


def test_a_server_for_others_needs_a_key(capsys: pytest.CaptureFixture[str]):
    code, out, err = called(capsys, "serve", "--engine", "fake", "--host", "0.0.0.0")
    assert (code, out) == (2, "")
    assert "make a key first: headwater keys add NAME" in err


def test_keys_are_made_listed_and_removed(capsys: pytest.CaptureFixture[str], data: Path):
    assert called(capsys, "keys")[1:] == ("", "No keys; the server takes requests of this machine alone.\n")
    code, made, said = called(capsys, "keys", "add", "anna")
    assert (code, said.count("cannot be shown again")) == (0, 1)
    assert Keys().find(made.strip()) is not None
    assert server_dir() == data / "server"
    assert "anna" in called(capsys, "keys", "list")[1]
    assert called(capsys, "keys", "remove", "anna")[:2] == (0, "Key anna is gone.\n")
    assert Keys().all() == ()
