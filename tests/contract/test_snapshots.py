"""Every engine's streams can be saved and taken up again: what comes next is what would have come.

To the bit, or where a runtime lays out anew what it takes up, within the rounding of that (`saved_tolerance`).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headwater.engines.base import Engine, Stream
from headwater.errors import CacheStateError, SnapshotError
from headwater.policies.window import Window

WINDOWS = [
    Window(budget=32, pins=4, block=1),
    Window(budget=32, pins=4, block=4),
    Window(budget=24, pins=0, block=8),
    Window(budget=24, pins=20, block=2),
    None,
]
IDS = [(index * 37 + index // 7) % 200 for index in range(700)]


def same(left: np.ndarray, right: np.ndarray, tolerance: float) -> None:
    np.testing.assert_allclose(left, right, rtol=0, atol=tolerance)


def restored(engine: Engine, stream: Stream, path: Path, **options: object) -> Stream:
    saved = stream.save(path, {"a": "b"})
    again = engine.restore(path, stream.window, digest=saved.digest, **options)  # pyright: ignore[reportArgumentType]
    assert again.notes == {"a": "b"}
    return again.stream


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("before", [0, 1, 3, 20, 33, 90, 500])
@pytest.mark.parametrize("reindex", [True, False])
def test_what_comes_next_is_the_same(
    engine: Engine, window: Window | None, before: int, reindex: bool, tmp_path: Path, saved_tolerance: float
):
    if window is None and before > 90:
        pytest.skip("longer than the trained length")
    stream = engine.open(window, reindex=reindex)
    if before:
        stream.feed(IDS[:before])
    saved = stream.save(tmp_path / "s.safetensors")
    again = engine.restore(saved.path, window, reindex=reindex)
    other = again.stream
    assert (again.logits is None) == (before == 0)
    assert other.seen == stream.seen
    np.testing.assert_array_equal(other.kept, stream.kept)
    assert other.nbytes == stream.nbytes
    rest = IDS[before : before + (30 if window is None else 180)]
    for start in range(0, 20, 1):
        same(other.feed(rest[start : start + 1]), stream.feed(rest[start : start + 1]), saved_tolerance)
    same(other.feed(rest[20:]), stream.feed(rest[20:]), saved_tolerance)
    np.testing.assert_array_equal(other.kept, stream.kept)


def test_the_logits_come_with_it(engine: Engine, tmp_path: Path, saved_tolerance: float):
    stream = engine.open(WINDOWS[0])
    logits = stream.feed(IDS[:50])
    stream.save(tmp_path / "s")
    again = engine.restore(tmp_path / "s", WINDOWS[0])
    np.testing.assert_array_equal(again.logits, logits)
    same(again.stream.score(IDS[50:60]), stream.score(IDS[50:60]), saved_tolerance)


def test_a_snapshot_is_of_its_moment(engine: Engine, tmp_path: Path, saved_tolerance: float):
    """The stream goes on before the file is written."""
    stream, other = engine.open(WINDOWS[1]), engine.open(WINDOWS[1])
    stream.feed(IDS[:70])
    other.feed(IDS[:70])
    snapshot = stream.snapshot()
    stream.feed(IDS[300:390])
    snapshot.write(tmp_path / "s")
    again = engine.restore(tmp_path / "s", WINDOWS[1]).stream
    same(again.feed(IDS[70:80]), other.feed(IDS[70:80]), saved_tolerance)


@pytest.mark.parametrize("window", [WINDOWS[1], None], ids=str)
def test_what_could_be_taken_back_still_can(
    engine: Engine, window: Window | None, tmp_path: Path, saved_tolerance: float
):
    stream = engine.open(window)
    stream.feed(IDS[:30])
    again = restored(engine, stream, tmp_path / "s")
    for each in (stream, again):
        each.rollback(5)
    same(again.feed(IDS[40:45]), stream.feed(IDS[40:45]), saved_tolerance)
    if window is not None:
        again.feed(IDS[:40])
        last = restored(engine, again, tmp_path / "t")
        with pytest.raises(CacheStateError, match="cannot roll back"):
            last.rollback(last.held)


def test_another_window_is_refused(engine: Engine, tmp_path: Path):
    stream = engine.open(WINDOWS[0])
    stream.feed(IDS[:40])
    stream.save(tmp_path / "s")
    with pytest.raises(SnapshotError, match="another window: budget 32, 4 pinned, block 1, and budget 32, 4"):
        engine.restore(tmp_path / "s", WINDOWS[1])
    with pytest.raises(SnapshotError, match=r"for another window: .*, and none is asked for"):
        engine.restore(tmp_path / "s", None)
    with pytest.raises(SnapshotError, match="made with re-indexing"):
        engine.restore(tmp_path / "s", WINDOWS[0], reindex=False)


def test_a_limit_that_is_too_small_is_refused(engine: Engine, tmp_path: Path):
    stream = engine.open(None)
    stream.feed(IDS[:40])
    stream.save(tmp_path / "s")
    with pytest.raises(SnapshotError, match="holds 40 tokens, which do not fit the limit of 39"):
        engine.restore(tmp_path / "s", None, limit_tokens=39)
    engine.restore(tmp_path / "s", None, limit_tokens=41)


def test_a_closed_stream_cannot_be_saved(engine: Engine, tmp_path: Path):
    stream = engine.open(WINDOWS[0])
    stream.close()
    with pytest.raises(CacheStateError, match="closed"):
        stream.save(tmp_path / "s")
    assert not list(tmp_path.iterdir())
