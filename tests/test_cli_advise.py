"""`headwater advise`: what the library is handed, and the command from end to end."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from headwater import cli
from headwater.bench.advise import run
from headwater.bench.advise_results import read


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    handed: dict[str, Any] = {}

    def record(**options: Any) -> int:
        inspect.signature(run).bind(**options)
        handed.update(options)
        return 0

    module = ModuleType("headwater.bench.advise")
    vars(module)["run"] = record
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return handed


def test_defaults_and_options(received: dict[str, Any]) -> None:
    assert cli.main(["advise"]) == 0
    assert received == {
        "model": "smollm2",
        "engine": "transformers",
        "conversation": None,
        "memory": None,
        "budget": None,
        "turns": None,
        "sinks": None,
        "seed": 0,
        "output": Path("report/advise"),
    }
    line = f"--model m --engine fake --conversation {__file__} --memory 512MB --turns 6 --sinks 4 --seed 2 --output out"
    assert cli.main(["advise", *line.split()]) == 0
    assert received["conversation"] == Path(__file__) and received["output"] == Path("out")
    assert (received["memory"], received["turns"], received["sinks"], received["seed"]) == ("512MB", 6, 4, 2)
    assert cli.main(["advise", "--budget", "256"]) == 0 and received["budget"] == 256


def test_from_end_to_end_on_the_fake_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = f"--model fake --engine fake --turns 8 --output {tmp_path}"
    assert cli.main(["advise", *line.split()]) == 0
    out, err = capsys.readouterr()
    assert "\nTake " in out and "\nheadwater chat --model fake --engine fake --policy " in out
    assert "Conversation: multiwoz-01, 8 turns" in err
    assert read(tmp_path / "advice.json").subject.model == "fake"
    assert (tmp_path / "index.html").read_text(encoding="utf-8").startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--memory 1GB --budget 100", "--memory and --budget cannot both be given"),
        ("--memory 12", "'12' is not a size of memory; write a number and one of B, kB, MB"),
        ("--engine fake --turns 8 --budget 32", "budgets are compared from 64 tokens on"),
        ("--conversation nowhere.jsonl", "nowhere.jsonl"),
    ],
)
def test_wrong_usage_is_exit_code_2(options: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["advise", *options.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and said in err and len(err.splitlines()) <= 9
