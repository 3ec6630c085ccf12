"""`headwater trace` from the command line to a folder, on the fake engine."""

from __future__ import annotations

import inspect
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from headwater import cli
from headwater.bench import recording
from headwater.traces.store import RecordedTrace

COMMAND = Path(sys.executable).with_name("headwater")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "story.txt"
    path.write_text("It was a dark and stormy night; the rain fell in torrents. " * 120)
    return path


def called(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = cli.main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err


def record(text: Path, folder: Path, *more: object) -> tuple[object, ...]:
    return ("trace", "record", "--engine", "fake", "--model", "tiny", "--text", text, "-o", folder, *more)


def test_what_is_recorded_is_shown_and_replayed(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = tmp_path / "mine"
    code, out, err = called(capsys, *record(text, folder, "--tokens", 200, "--layers", "0,2-3", "--heads", "1"))
    assert code == 0
    assert "Rows:   3 layers (0, 2-3), 1 heads (1), as float16" in err
    assert "Tokens:       200, complete" in out
    assert called(capsys, "trace", "info", folder) == (0, out, "")
    code, out, _ = called(capsys, "replay", "--trace", folder, "--budgets", "64", "--policies", "h2o", "--json")
    assert code == 0
    assert '"retained_attention_mass"' in out


def test_every_option_reaches_the_library(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    handed = dict[str, Any]()

    def run(**options: Any) -> int:
        inspect.signature(original).bind(**options)
        handed.update(options)
        return 0

    original = recording.run
    monkeypatch.setattr(recording, "run", run)
    more = ("--tokens", 300, "--layers", "7,0-2", "--heads", "4", "--dtype", "float32", "--memory", "1GiB")
    assert cli.main([str(each) for each in record(text, tmp_path / "mine", *more)]) == 0
    assert handed == {
        "model": "tiny",
        "engine": "fake",
        "text": text,
        "output": tmp_path / "mine",
        "tokens": 300,
        "layers": (7, 0, 1, 2),
        "heads": (4,),
        "dtype": "float32",
        "memory": "1GiB",
    }


def test_the_defaults_are_those_of_the_library(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    handed = dict[str, Any]()
    parameters = inspect.signature(recording.run).parameters
    monkeypatch.setattr(recording, "run", lambda **options: handed.update(options) or 0)
    assert cli.main(["trace", "record", "--text", str(text), "-o", str(tmp_path / "mine")]) == 0
    assert handed.pop("model") == "smollm2"
    for name in ("engine", "tokens", "layers", "heads", "dtype", "memory"):
        assert handed[name] == parameters[name].default, name


@pytest.mark.parametrize("spans", ["", "a", "1,", "3-1", "-1", "1-", "0,5,10--20", "1.5", "²"])
def test_layers_that_are_no_numbers_are_refused(
    text: Path, tmp_path: Path, spans: str, capsys: pytest.CaptureFixture[str]
):
    code, out, err = called(capsys, *record(text, tmp_path / "mine", "--layers", spans))
    assert (code, out) == (2, "")
    assert "is not a comma list of whole numbers and ranges such as 0,5,10-20" in err


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--layers", "9"), 2, "there is no layer 9 to watch; tiny shows layers 0-3"),
        (("--tokens", "8000"), 2, "story.txt has 7,080 tokens, and 8,000 were asked for; ask for fewer"),
        (("--tokens", "1"), 2, "1 is not in the range"),
        (("--memory", "512"), 2, "'512' is not a size of memory"),
        (("--memory", "1MB"), 2, "976.6 KiB of memory do not hold"),
        (("--dtype", "int4"), 2, "'int4' is not one of 'float16', 'float32'"),
    ],
    ids=str,
)
def test_what_cannot_be_recorded_is_said_in_a_line_or_two(
    text: Path, tmp_path: Path, options: tuple[str, ...], code: int, words: str, capsys: pytest.CaptureFixture[str]
):
    given, out, err = called(capsys, *record(text, tmp_path / "mine", *options))
    assert (given, out) == (code, "")
    assert words in err
    assert len(err.splitlines()) <= 2


def test_what_is_no_recording_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    code, out, err = called(capsys, "trace", "info", tmp_path)
    assert (code, out) == (2, "")
    assert err == f"headwater: {tmp_path} has no zarr.json, so it is no recorded trace\n"


def test_trace_alone_shows_its_commands(capsys: pytest.CaptureFixture[str]):
    code, out, err = called(capsys, "trace")
    assert (code, err) == (0, "")
    assert "record  Record what a model attends to over a text." in out


def test_ctrl_c_leaves_a_recording_that_the_same_command_ends(text: Path, tmp_path: Path):
    command = [str(each) for each in (COMMAND, *record(text, tmp_path / "mine", "--tokens", 2000))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    metadata = tmp_path / "mine" / "zarr.json"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (metadata.exists() and '"recorded": 0' not in metadata.read_text()):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode == 130, err
    assert out == ""
    assert err.endswith(
        f"Interrupted; what was recorded is in {tmp_path / 'mine'}, and the same command goes on after it\n"
    )
    begun = RecordedTrace(tmp_path / "mine").tokens
    assert 0 < begun < 2000
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"{begun:,} of 2,000 tokens are there already" in done.stderr
    assert "Tokens:       2,000, complete" in done.stdout
