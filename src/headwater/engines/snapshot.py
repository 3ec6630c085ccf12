"""A stream's cache as a file: written whole or not at all, read only when every byte is as it was written.

Knows the file: the layout of safetensors (eight bytes of length, a JSON header, then the numbers), so that other tools
can look into it, with all facts as text in the header's metadata. Its last tensor, `digest`, is the XXH3-128 of every
byte before it. Does not know what the numbers mean: engines do.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from headwater.errors import SnapshotError, UsageError
from headwater.policies import Policy
from headwater.policies.window import Window

FORMAT, SCHEMA = "headwater-snapshot", 1
DIGEST, DIGEST_BYTES = "digest", 16
ALIGNED = 64
LONGEST_HEADER = 1 << 24
PIECE = 8 << 20
"""Bytes written at a time, of which the disk is told."""
DTYPES = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": np.uint16,
    "F64": np.float64,
    "I32": np.int32,
    "U32": np.uint32,
    "I64": np.int64,
    "U8": np.uint8,
    "I8": np.int8,
}
"""How safetensors names what there is; NumPy has no bfloat16, whose bits are kept as integers."""

Held = Window | Policy[Any] | None
"""What a stream keeps: a window, what a policy picks in every head, or (None) everything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A tensor of a snapshot: its name in `DTYPES`, and an array of its own."""

    dtype: str
    array: NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedSnapshot:
    """A snapshot on the disk, and what it was sealed with."""

    path: Path
    nbytes: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class Snapshot:
    """What the next step of a stream would use, in memory of its own: the stream may go on meanwhile.

    An engine may use the memory of the parts again when the snapshot is gone.
    `fingerprint` is the engine's, `state` what the engine needs beside the tensors, as JSON allows.
    """

    fingerprint: str
    window: Held
    reindex: bool
    state: Mapping[str, Any]
    parts: Mapping[str, Part]

    def write(self, path: Path | str, notes: Mapping[str, str] | None = None) -> SavedSnapshot:
        """Put it into a file, readable by its owner alone, in the place of one that is there; `notes` go with it.

        The file is whole and on the disk when this returns; until then the old one stays. Any thread may do it. Raises
        SnapshotError when the disk does not take it, UsageError for notes that are no texts, or too long.
        """
        path = Path(path)
        header, body = self._header(_checked(notes or {}))
        half = path.with_name(f".{path.name}.{secrets.token_hex(4)}.half")
        seal, size = xxhash.xxh3_128(), 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with os.fdopen(os.open(half, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", buffering=0) as file:
                for piece in (header, *(piece for tensor in body for piece in _pieces(tensor))):
                    seal.update(piece)
                    _write_all(file, piece)
                    _send(file, size, len(piece))
                    size += len(piece)
                size += _write_all(file, memoryview(seal.digest()))
                os.fsync(file.fileno())
            half.replace(path)
            _sync_folder(path.parent)
        except OSError as error:
            half.unlink(missing_ok=True)
            raise SnapshotError(f"{path} cannot be written: {error.strerror}") from error
        except BaseException:
            half.unlink(missing_ok=True)
            raise
        return SavedSnapshot(path=path, nbytes=size, digest=seal.hexdigest())

    def _header(self, notes: Mapping[str, str]) -> tuple[memoryview, list[memoryview]]:
        """What comes first in the file, and the numbers after it."""
        facts = {
            "format": FORMAT,
            "schema": str(SCHEMA),
            "fingerprint": self.fingerprint,
            "window": json.dumps(told(self.window)),
            "reindex": json.dumps(self.reindex),
            "state": json.dumps(self.state),
            "notes": json.dumps(dict(notes)),
        }
        content: dict[str, Any] = {"__metadata__": facts}
        body: list[memoryview] = []
        place = 0
        for name, part in self.parts.items():
            array = np.ascontiguousarray(part.array)
            stop = place + array.nbytes
            content[name] = {"dtype": part.dtype, "shape": list(part.array.shape), "data_offsets": [place, stop]}
            body.append(array.reshape(-1).view(np.uint8).data)
            place = stop
        content[DIGEST] = {"dtype": "U8", "shape": [DIGEST_BYTES], "data_offsets": [place, place + DIGEST_BYTES]}
        text = json.dumps(content, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % ALIGNED)
        if len(text) > LONGEST_HEADER:
            raise UsageError(
                f"the notes make a header of {len(text):,} bytes, allowed are {LONGEST_HEADER:,}; keep less in them"
            )
        return memoryview(len(text).to_bytes(8, "little") + text), body


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """What a file held: arrays that share one piece of memory, the engine's `state`, and the caller's `notes`."""

    path: Path
    arrays: Mapping[str, NDArray[Any]]
    dtypes: Mapping[str, str]
    state: Mapping[str, Any]
    notes: Mapping[str, str]


def read_snapshot(
    path: Path | str, *, fingerprint: str, window: Held, reindex: bool, digest: str | None = None
) -> Content:
    """The content of a snapshot that this engine can go on from.

    Raises SnapshotError for a file that is missing, cut short, altered by as much as a bit, written by a newer version,
    of another model, for another window, or (with `digest`) another file than the one meant.
    """
    sealed = check_snapshot(path)
    if digest is not None and digest != sealed.digest:
        raise SnapshotError(f"{path} is another snapshot than the one meant: {sealed.digest}, not {digest}")
    _check_fits(sealed.path, sealed.facts, fingerprint, window, reindex)
    entries = {name: entry for name, entry in sealed.entries.items() if name != DIGEST}
    return Content(
        path=sealed.path,
        arrays={name: _array(sealed.data, entry) for name, entry in entries.items()},
        dtypes={name: entry["dtype"] for name, entry in entries.items()},
        state=json.loads(sealed.facts["state"]),
        notes=json.loads(sealed.facts["notes"]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealed:
    """A file whose bytes are as they were written: the header's `facts`, where each tensor lies, and the numbers."""

    path: Path
    facts: Mapping[str, str]
    entries: Mapping[str, Any]
    data: NDArray[np.uint8]
    digest: str


def check_snapshot(path: Path | str) -> Sealed:
    """Raises SnapshotError unless a file is a whole snapshot, whatever model and window it is for."""
    path = Path(path)
    raw = _read_all(path)
    length = int.from_bytes(raw[:8].tobytes(), "little")
    if len(raw) < 8 + DIGEST_BYTES or length > min(LONGEST_HEADER, len(raw) - 8 - DIGEST_BYTES):
        raise SnapshotError(f"{path} is no snapshot, or is cut short: it has {len(raw)} bytes")
    try:
        content = json.loads(raw[8 : 8 + length].tobytes())
        facts = content.pop("__metadata__")
        size = 8 + length + content[DIGEST]["data_offsets"][1]
        known = facts["format"] == FORMAT
        schema = int(facts["schema"])
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise SnapshotError(f"{path} is no snapshot, or its header is damaged") from error
    if not known:
        raise SnapshotError(f"{path} is no snapshot: its format is {facts['format']!r}, not {FORMAT!r}")
    if size != len(raw):
        raise SnapshotError(f"{path} is cut short or altered: it has {len(raw)} bytes and should have {size}")
    seal, there = xxhash.xxh3_128(raw[:-DIGEST_BYTES].data), raw[-DIGEST_BYTES:].tobytes()
    if seal.digest() != there:
        raise SnapshotError(f"{path} is damaged: its digest is {there.hex()}, and its content gives {seal.hexdigest()}")
    if schema > SCHEMA:  # last: a damaged file must not send anybody for an upgrade
        raise SnapshotError(
            f"{path} was written by a newer Headwater (schema {schema}; this one knows {SCHEMA}); upgrade to read it"
        )
    return Sealed(path=path, facts=facts, entries=content, data=raw[8 + length :], digest=seal.hexdigest())


def _check_fits(path: Path, facts: Mapping[str, str], fingerprint: str, window: Held, reindex: bool) -> None:
    if facts["fingerprint"] != fingerprint:
        raise SnapshotError(
            f"{path} is of another model, or of other weights or another precision of it: "
            f"{facts['fingerprint'][:12]}, and this one is {fingerprint[:12]}"
        )
    was = json.loads(facts["window"])
    now = told(window)
    if was != now:
        raise SnapshotError(f"{path} is for another window: {_in_words(was)}, and {_in_words(now)} is asked for")
    if json.loads(facts["reindex"]) != reindex:
        raise SnapshotError(f"{path} was made {'without' if reindex else 'with'} re-indexing")


def told(held: Held) -> list[int] | str | None:
    """What a stream keeps, as JSON allows."""
    return [held.budget, held.pins, held.block] if isinstance(held, Window) else None if held is None else repr(held)


def _in_words(held: list[int] | str | None) -> str:
    if isinstance(held, list):
        return "budget {}, {} pinned, block {}".format(*held)
    return held or "none"


def _array(data: NDArray[np.uint8], entry: Mapping[str, Any]) -> NDArray[Any]:
    start, stop = entry["data_offsets"]
    return data[start:stop].view(DTYPES[entry["dtype"]]).reshape(entry["shape"])


def _read_all(path: Path) -> NDArray[np.uint8]:
    try:
        if path.exists() and not path.is_file():  # a pipe would wait for ever
            raise SnapshotError(f"{path} cannot be read: it is no file")
        with path.open("rb", buffering=0) as file:
            raw = np.empty(os.fstat(file.fileno()).st_size, dtype=np.uint8)
            place = 0
            while place < len(raw) and (count := file.readinto(raw[place:].data)):
                place += count
    except FileNotFoundError as error:
        raise SnapshotError(f"{path} is not there") from error
    except OSError as error:
        raise SnapshotError(f"{path} cannot be read: {error.strerror}") from error
    return raw[:place]


def _write_all(file: Any, piece: memoryview) -> int:
    """A raw file may take less than it is given."""
    place = 0
    while place < len(piece):
        place += file.write(piece[place:])
    return place


def _pieces(tensor: memoryview) -> Iterator[memoryview]:
    return (tensor[start : start + PIECE] for start in range(0, len(tensor), PIECE))


def _send(file: Any, start: int, count: int) -> None:
    """Let the disk begin with these bytes while more are written; else it would begin at the flush. Linux does when it
    is told that nobody will read them."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), start, count, os.POSIX_FADV_DONTNEED)


def _checked(notes: Mapping[str, str]) -> Mapping[str, str]:
    if wrong := [name for name, note in notes.items() if not isinstance(name, str) or not isinstance(note, str)]:
        raise UsageError(f"notes are texts under texts, got {notes[wrong[0]]!r} under {wrong[0]!r}")
    return notes


def _sync_folder(folder: Path) -> None:
    """The new name is on the disk, too, where folders can be opened."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
