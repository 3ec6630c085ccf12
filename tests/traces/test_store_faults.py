"""Recordings that are killed or meet a full disk: what is there stays a trace, and the same command ends it."""

from __future__ import annotations

import errno
import json
import multiprocessing
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from headwater.errors import TraceNotStored
from headwater.traces.store import RecordedTrace, TraceWriter
from headwater.traces.zarray import Triangle
from tests.traces import recorder
from tests.traces.recordings import append, facts, weights

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a recording that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole") / "trace"
    recorder.record(folder)
    return folder


def chunk_files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in (folder / "c").rglob("*") if path.is_file()}


def recorded(folder: Path) -> int:
    """How many tokens are said to be complete; -1 before there is a trace."""
    try:
        return json.loads((folder / "zarr.json").read_bytes())["attributes"]["recorded"]
    except FileNotFoundError:
        return -1


def test_a_recording_killed_at_any_moment_is_a_beginning_and_goes_on_to_the_same_end(whole: Path, tmp_path: Path):
    """Twelve kills, each a random moment after a random number of bands; what is complete is right after each."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.traces.recorder"])
    expected, chance = RecordedTrace(whole).whole(), random.Random(5)
    beginnings, folder = [], tmp_path / "trace"
    for _ in range(12):
        if recorded(folder) == recorder.TOKENS:
            shutil.rmtree(folder)
        enough = recorded(folder) + chance.choice((0, 1, 64, 128, 192))
        process = context.Process(target=recorder.record, args=(folder,))
        process.start()
        while recorded(folder) < enough and process.is_alive():
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.02))
        process.kill()
        process.join()
        if recorded(folder) < 2:
            continue
        trace = RecordedTrace(folder)
        np.testing.assert_array_equal(trace.whole(), expected[:, : trace.tokens - 1, : trace.tokens])
        beginnings.append(trace.tokens)
    assert len(set(beginnings)) > 3
    recorder.record(folder)
    assert RecordedTrace(folder).complete
    assert chunk_files(folder) == chunk_files(whole)
    assert not list(folder.rglob("*.partial"))


def test_a_disk_that_fills_up_leaves_what_is_there_and_says_how_to_go_on(tmp_path: Path, monkeypatch):
    of = facts()
    whole, folder = weights(of), tmp_path / "trace"
    writer = TraceWriter(folder, of)
    append(writer, whole, 128)

    def full(self: Triangle, first: int, block: np.ndarray) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(Triangle, "write", full)
        with pytest.raises(TraceNotStored, match=r"No space left on device while writing to .*: 128 of 300 tokens are"):
            append(writer, whole, 300)
    assert RecordedTrace(folder).tokens == 128
    append(TraceWriter(folder, of), whole, 300)
    np.testing.assert_array_equal(RecordedTrace(folder).whole(), whole.reshape(6, 300, 300)[:, 1:].astype(np.float32))


def refused(folder: Path, file_bytes: int) -> str:
    """The error of a recording in a process of its own, in which no file may grow above that size."""
    program = (
        "from pathlib import Path\nfrom tests.traces.recorder import record\n"
        f"try:\n    record(Path({str(folder)!r}), file_bytes={file_bytes})\n"
        "except Exception as error:\n    print(type(error).__name__, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.stdout


def test_a_file_that_may_not_grow_stops_the_recording_and_a_later_one_ends_it(whole: Path, tmp_path: Path):
    sizes = sorted(len(content) for content in chunk_files(whole).values())
    said = refused(tmp_path / "trace", sizes[len(sizes) // 2])
    assert said.startswith("TraceNotStored File too large while writing to ")
    assert "tokens are recorded and stay readable; make room and run the same command again" in said
    trace = RecordedTrace(tmp_path / "trace")
    assert 0 < trace.tokens < recorder.TOKENS
    expected = RecordedTrace(whole).whole()
    np.testing.assert_array_equal(trace.whole(), expected[:, : trace.tokens - 1, : trace.tokens])
    recorder.record(tmp_path / "trace")
    assert chunk_files(tmp_path / "trace") == chunk_files(whole)


def test_a_disk_that_is_really_full_leaves_a_trace_that_goes_on_when_there_is_room(whole: Path, small_disk: Path):
    folder = small_disk / "trace"
    with pytest.raises(
        TraceNotStored, match=r"No space left on device while writing to .* tokens are recorded and stay"
    ):
        recorder.record(folder)
    trace = RecordedTrace(folder)
    assert 0 < trace.tokens < recorder.TOKENS
    expected = RecordedTrace(whole).whole()
    np.testing.assert_array_equal(trace.whole(), expected[:, : trace.tokens - 1, : trace.tokens])
    subprocess.run(["mount", "-o", "remount,size=40m", small_disk], check=True)
    recorder.record(folder)
    assert chunk_files(folder) == chunk_files(whole)
