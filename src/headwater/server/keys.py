"""Keys of the server: made here, shown once, kept as digests.

Knows the file and how a key is checked. Does not know what a key may do. A key is 256 random bits, so a plain digest of
it cannot be guessed, and needs no salt. Every digest is compared in constant time, and all of them always.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from headwater.chat.journal import now
from headwater.chat.store import check_name
from headwater.database import data_dir
from headwater.errors import StoreError, UnknownName, UsageError

FILE = "keys.json"
FOLDER = "server"
PREFIX = "hw-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """`id` names the key's sessions on the disk; it is no part of the key."""

    id: str
    name: str
    sha256: str
    created: str


def server_dir() -> Path:
    """Where the server keeps its sessions and keys."""
    return data_dir().absolute() / FOLDER


class Keys:
    """The keys in a file. Raises StoreError when it cannot be read or written."""

    def __init__(self, folder: Path | None = None) -> None:
        self.path = (server_dir() if folder is None else folder) / FILE
        self._read_at = -1
        self._keys: tuple[Key, ...] = ()

    def all(self) -> tuple[Key, ...]:
        """Every key, as the file has them now."""
        try:
            changed = self.path.stat().st_mtime_ns
        except FileNotFoundError:
            self._read_at, self._keys = -1, ()
            return ()
        except OSError as error:
            raise StoreError(f"{self.path} cannot be read: {error.strerror}") from error
        if changed != self._read_at:
            try:
                self._keys = tuple(Key(**each) for each in json.loads(self.path.read_text(encoding="utf-8")))
            except (OSError, ValueError, TypeError) as error:
                raise StoreError(f"{self.path} does not hold keys: {error}; move it away and add them again") from error
            self._read_at = changed
        return self._keys

    def add(self, name: str) -> str:
        """Make a key; returns it, once and for all. Raises UsageError for a name that is taken or cannot be one."""
        check_name(name)
        keys = self.all()
        if any(key.name == name for key in keys):
            raise UsageError(f"there is a key {name!r} already; take another name, or remove that one")
        new = PREFIX + secrets.token_urlsafe(32)
        made = Key(id=secrets.token_hex(8), name=name, sha256=_digest(new), created=now())
        self._write((*keys, made))
        return new

    def remove(self, name: str) -> None:
        """Forget a key; its sessions stay on the disk. Raises UnknownName."""
        keys = self.all()
        if all(key.name != name for key in keys):
            raise UnknownName("key", name, [key.name for key in keys])
        self._write(tuple(key for key in keys if key.name != name))

    def find(self, given: str) -> Key | None:
        """The key that was given, if it is one."""
        digest, found = _digest(given), None
        for key in self.all():
            if hmac.compare_digest(key.sha256, digest):
                found = key
        return found

    def _write(self, keys: tuple[Key, ...]) -> None:
        rows = [{name: getattr(key, name) for name in Key.__slots__} for key in keys]
        half = self.path.with_name(f".{FILE}.{os.getpid()}.half")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with os.fdopen(os.open(half, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                json.dump(rows, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            half.replace(self.path)
        except OSError as error:
            raise StoreError(f"{self.path} cannot be written: {error.strerror}") from error
        self._read_at = -1


def _digest(key: str) -> str:
    return sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
