"""The file of a snapshot: whole or not at all, and read only when every byte is as it was written."""

from __future__ import annotations

import json
import os
import random
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headwater.engines import snapshot
from headwater.engines.fake import FakeEngine
from headwater.engines.snapshot import Part, Snapshot, read_snapshot
from headwater.errors import SnapshotError, UsageError
from headwater.policies.window import Window

WINDOW = Window(budget=9, pins=2, block=1)
PARTS = {
    "positions": Part(dtype="I64", array=np.arange(5)),
    "odd": Part(dtype="U8", array=np.arange(3, dtype=np.uint8)),
    "half": Part(dtype="BF16", array=np.arange(12, dtype=np.uint16).reshape(3, 4)),
    "empty": Part(dtype="F32", array=np.zeros((0, 4), dtype=np.float32)),
    "logits": Part(dtype="F32", array=np.linspace(0, 1, 7, dtype=np.float32)),
}


def made(**changes: Any) -> Snapshot:
    defaults: dict[str, Any] = {
        "fingerprint": "f" * 64,
        "window": WINDOW,
        "reindex": True,
        "state": {"seen": 2**70, "name": "é"},
        "parts": PARTS,
    }
    return Snapshot(**{**defaults, **changes})


def read(path: Path, **changes: Any) -> snapshot.Content:
    return read_snapshot(path, **{"fingerprint": "f" * 64, "window": WINDOW, "reindex": True, **changes})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made().write(tmp_path / "a.safetensors", {"turns": "7", "text": "nul \0 and ü"})
    return tmp_path / "a.safetensors"


def test_what_was_written_is_read(file: Path):
    content = read(file)
    assert content.state == {"seen": 2**70, "name": "é"}
    assert content.notes == {"turns": "7", "text": "nul \0 and ü"}
    assert content.dtypes == {name: part.dtype for name, part in PARTS.items()}
    for name, part in PARTS.items():
        np.testing.assert_array_equal(content.arrays[name], part.array)


def test_other_tools_can_read_it(file: Path):
    safetensors = pytest.importorskip("safetensors")
    with safetensors.safe_open(file, framework="pt") as tensors:
        assert set(tensors.keys()) == {*PARTS, "digest"}
        assert tensors.metadata()["format"] == "headwater-snapshot"
        assert tensors.get_tensor("half").shape == (3, 4)
        np.testing.assert_array_equal(tensors.get_tensor("logits").numpy(), PARTS["logits"].array)


def test_it_is_its_owners_alone_and_takes_the_place_of_the_old_one(file: Path):
    saved = made(state={"seen": 1}).write(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert list(file.parent.iterdir()) == [file]
    assert saved.nbytes == file.stat().st_size
    assert read(file, digest=saved.digest).state == {"seen": 1}
    with pytest.raises(SnapshotError, match="another snapshot than the one meant"):
        read(file, digest="0" * 32)


def test_every_flipped_byte_is_found(file: Path):
    """Every byte of a small file, and every bit of its first bytes."""
    whole = file.read_bytes()
    for place in range(len(whole)):
        for bit in range(8) if place < 16 else (place % 8,):
            altered = bytearray(whole)
            altered[place] ^= 1 << bit
            file.write_bytes(altered)
            with pytest.raises(SnapshotError):
                read(file)
    file.write_bytes(whole)
    read(file)


def test_every_truncation_is_found(file: Path):
    whole = file.read_bytes()
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        with pytest.raises(SnapshotError, match=r"cut short|no snapshot"):
            read(file)
    file.write_bytes(whole + b"\0")
    with pytest.raises(SnapshotError, match=f"has {len(whole) + 1} bytes and should have {len(whole)}"):
        read(file)


def test_flipped_bytes_of_a_real_stream_are_found(tmp_path: Path):
    engine, path, chance = FakeEngine(), tmp_path / "s", random.Random(0)
    stream = engine.open(WINDOW)
    stream.feed(list(range(50)))
    stream.save(path)
    whole = path.read_bytes()
    for _ in range(300):
        altered = bytearray(whole)
        altered[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
        path.write_bytes(altered)
        with pytest.raises(SnapshotError):
            engine.restore(path, WINDOW)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "no snapshot, or is cut short: it has 0 bytes"),
        (b"1234567", "no snapshot, or is cut short"),
        (b"\xff" * 100, "no snapshot, or is cut short"),
        ((2**40).to_bytes(8, "little") + b"{}", "no snapshot, or is cut short"),
        ((2).to_bytes(8, "little") + b"{}".ljust(40), "header is damaged"),
        ((4).to_bytes(8, "little") + b"[[]]".ljust(40), "header is damaged"),
        ((6).to_bytes(8, "little") + b"\xff{}   ".ljust(40), "header is damaged"),
        ((50_000).to_bytes(8, "little") + b"[" * 50_016, "header is damaged"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path: Path, content: bytes, said: str):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(SnapshotError, match=said):
        read(tmp_path / "x")


def test_a_real_safetensors_file_of_something_else_is_refused(tmp_path: Path):
    numpy = pytest.importorskip("safetensors.numpy")
    numpy.save_file({"a": np.zeros(3), "digest": np.zeros(16, np.uint8)}, tmp_path / "x", metadata={"format": "pt"})
    with pytest.raises(SnapshotError, match="no snapshot"):
        read(tmp_path / "x")


def test_a_file_that_is_not_there_is_said(tmp_path: Path):
    with pytest.raises(SnapshotError, match="is not there"):
        read(tmp_path / "x")
    with pytest.raises(SnapshotError, match="cannot be read"):
        read(tmp_path)


def test_a_newer_schema_is_said(file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(snapshot, "SCHEMA", 3)
    made().write(file)
    monkeypatch.undo()
    with pytest.raises(SnapshotError, match=r"newer Headwater \(schema 3; this one knows 1\)"):
        read(file)


def test_damage_is_said_before_what_it_makes_of_the_schema(file: Path):
    """One bit turns schema 1 into 3: that is no newer Headwater, and nobody needs to upgrade."""
    file.write_bytes(file.read_bytes().replace(b'"schema":"1"', b'"schema":"3"'))
    with pytest.raises(SnapshotError, match=f"is damaged: its digest is {file.read_bytes()[-16:].hex()}"):
        read(file)


def test_a_pipe_is_no_file(tmp_path: Path):
    """It would wait for a writer for ever."""
    os.mkfifo(tmp_path / "x")
    with pytest.raises(SnapshotError, match="it is no file"):
        read(tmp_path / "x")


def test_notes_are_texts_that_can_be_read_again(tmp_path: Path):
    with pytest.raises(UsageError, match="notes are texts under texts, got 3 under 'seed'"):
        made().write(tmp_path / "x", {"seed": 3})  # type: ignore[dict-item]
    with pytest.raises(UsageError, match="keep less in them"):
        made().write(tmp_path / "x", {"long": "x" * snapshot.LONGEST_HEADER})
    assert not list(tmp_path.iterdir())


def test_it_is_on_the_disk_before_it_has_its_name_and_the_name_before_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A power cut leaves the old snapshot or the new one. Seen from outside as the order of three calls."""
    calls: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def flush(handle: int) -> None:
        calls.append("folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else f"file of {os.fstat(handle).st_size}")
        fsync(handle)

    def rename(source: Path, target: Path) -> Path:
        calls.append("rename")
        return replace(source, target)

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(Path, "replace", rename)
    saved = made().write(tmp_path / "x")
    assert calls == [f"file of {saved.nbytes}", "rename", "folder"]


def test_another_model_is_said(file: Path):
    with pytest.raises(SnapshotError, match="of another model, or of other weights"):
        read(file, fingerprint="e" * 64)


def test_a_disk_that_is_full_leaves_the_old_one(file: Path, monkeypatch: pytest.MonkeyPatch):
    before = file.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SnapshotError, match="cannot be written: No space left on device"):
        made(state={}).write(file)
    assert file.read_bytes() == before
    assert list(file.parent.iterdir()) == [file]


def test_its_size_is_what_it_holds(tmp_path: Path):
    array = np.zeros(1_000_000, dtype=np.float32)
    saved = made(parts={"a": Part(dtype="F32", array=array)}).write(tmp_path / "x")
    assert array.nbytes < saved.nbytes < array.nbytes + 1024
    assert json.loads((tmp_path / "x").read_bytes()[8:600].split(b"\0")[0])["a"]["data_offsets"] == [0, array.nbytes]
