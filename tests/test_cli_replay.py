"""`headwater replay` from the command line to its files, over a short canonical trace."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from headwater import cli
from headwater.bench.replay_results import read
from headwater.policies import POLICIES
from headwater.traces import ArrayTrace, replay
from headwater.traces.canonical import canonical_trace
from tests.bench.tags import check_stands_alone
from tests.bench.traces import recorded

SHORT = ["replay", "--tokens", "512", "--budgets", "64,128"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the command leaves in its folder."""
    folder = tmp_path_factory.mktemp("replay")
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys; from headwater import cli; sys.exit(cli.main({[*SHORT, '--output', str(folder)]}))",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    (folder / "stdout").write_text(done.stdout)
    (folder / "stderr").write_text(done.stderr)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_table_has_the_figures_of_the_library(folder: Path) -> None:
    lines = (folder / "stdout").read_text().splitlines()
    trace = canonical_trace(tokens=512)
    named = [name for name in POLICIES if name != "full"]
    for name in named:
        for budget in (64, 128):
            alone = replay(trace, name, budget=budget)
            figures = [
                name,
                str(budget),
                f"{alone.retained_attention_mass:.6f}",
                f"{alone.heavy_hitter_recall:.6f}",
                str(alone.eviction_calls),
            ]
            assert sum(line.split()[:5] == figures for line in lines) == 1, figures
    assert lines[-2:] == [f"Results: {folder / 'results.json'}", f"Report:  {folder / 'index.html'}"]


def test_the_header_says_what_runs(folder: Path) -> None:
    lines = (folder / "stderr").read_text().splitlines()
    assert lines[0] == "Trace:    decode-512, 512 tokens, 1 head"
    assert f"Policies: {', '.join(name for name in POLICIES if name not in ('full', 'random'))}, random" in lines
    assert "Budgets:  64, 128 tokens" in lines
    assert lines[-1] == "replay: 511 of 511"


def test_the_page_and_the_json_lie_in_the_folder(folder: Path) -> None:
    results = read(folder / "results.json")
    assert results.complete and len(results.rows) == 2 * (len(POLICIES) - 1)
    assert {"numpy", "numba"} <= set(results.versions)
    page = (folder / "index.html").read_text()
    check_stands_alone(page)
    for row in results.rows:
        assert f"{row.retained_attention_mass:.6f}" in page and f"{row.heavy_hitter_recall:.6f}" in page


def test_json_goes_to_stdout_and_nothing_to_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main([*SHORT, "--policies", "streaming-llm", "--sinks", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["parameters"] for row in found["rows"]] == [{"sinks": 2}] * 2
    assert found["rows"][0]["retained_attention_mass"] == (
        replay(canonical_trace(tokens=512), "streaming-llm", budget=64, sinks=2).retained_attention_mass
    )
    assert list(tmp_path.iterdir()) == []


def test_a_recorded_trace_is_replayed_like_the_same_array(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    array = recorded(tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    line = "--trace mine --policies tova --budgets 16 --output out"
    assert cli.main(["replay", *line.split()]) == 0
    out, err = capsys.readouterr()
    whole, alone = read(tmp_path / "out" / "results.json"), replay(array, "tova", budget=16)
    assert whole.rows[0].retained_attention_mass == alone.retained_attention_mass
    assert whole.rows[0].mass_by_head == tuple(alone.mass_by_row)
    assert "6 heads in 3 layers" in err and f"Text:     nothing.txt, sha256 {'1' * 64}" in err.splitlines()
    assert "10th to 90th percentile of heads" in out

    assert cli.main(["replay", *line.split(), "--layers", "3", "--heads", "2", "--tokens", "50"]) == 0
    part = read(tmp_path / "out" / "results.json")
    assert (part.trace.heads, part.trace.tokens) == (((3, 2),), 50)
    cut = ArrayTrace(np.pad(array.whole(), ((0, 0), (1, 0), (0, 0)))[3, :50, :50])
    assert part.rows[0].retained_attention_mass == replay(cut, "tova", budget=16).retained_attention_mass


def test_a_recording_without_one_of_its_files_is_refused_naming_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded(tmp_path / "mine")
    lost = next(path for path in (tmp_path / "mine" / "c").rglob("*") if path.is_file())
    lost.unlink()
    assert cli.main(["replay", "--trace", str(tmp_path / "mine"), "--budgets", "40", "--json"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and f"headwater: {lost}" in err


REFUSED = {
    "policy": (["--policies", "tova,lru"], 2, "unknown policy 'lru'; known: full, "),
    "twice": (["--policies", "tova,tova"], 2, "policy 'tova' is given 2 times"),
    "budget": (["--budgets", "512"], 2, "a budget of 512 is not below the 512 tokens of the trace"),
    "window": (["--policies", "sliding-window", "--recent-window", "8"], 2, "none of sliding-window has the parameter"),
    "sinks": (["--policies", "sliding-window,full", "--sinks", "8"], 2, "none of sliding-window, full has"),
    "sinks and budget": (["--policies", "streaming-llm", "--sinks", "64"], 2, "streaming-llm: sinks must be below"),
    "layer": (["--layers", "3"], 2, "decode-512 has no layer 3; it has 0"),
    "no folder": (["--trace", "nowhere"], 2, "there is no nowhere, so it is no recorded trace"),
    "output": (["--output", "/proc/none"], 1, "/proc/none: cannot be written"),
}


@pytest.mark.parametrize(("arguments", "code", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_done_is_refused_before_the_first_step(
    arguments: list[str],
    code: int,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main([*SHORT, *arguments]) == code
    out, err = capsys.readouterr()
    assert out == "" and words in err
    assert err.startswith("headwater: ") and len(err.splitlines()) <= 2
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_ends_with_code_130_and_leaves_no_results(tmp_path: Path) -> None:
    """A pass that takes long; the signal comes when it has begun."""
    code = (
        "import sys, time\n"
        "from headwater import cli\n"
        "from headwater.traces.canonical import CanonicalTrace\n"
        "chunks = CanonicalTrace.chunks\n"
        "def slow(self, chunk_bytes=1):\n"
        "    for chunk in chunks(self, chunk_bytes):\n"
        "        yield chunk\n"
        "        print('begun', flush=True)\n"
        "        time.sleep(30)\n"
        "CanonicalTrace.chunks = slow\n"
        f"sys.exit(cli.main(['replay', '--policies', 'streaming-llm', '--output', {str(tmp_path)!r}]))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "Interrupted; nothing was replayed to its end"
    assert os.listdir(tmp_path) == []
