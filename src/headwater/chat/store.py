"""The user's sessions: which there are, where their files lie, and who has one open.

Knows names, folders and locks. Does not know what a journal's rows or a snapshot's bytes mean. A session's files are
named by an id of its own, never by what the user calls it.
"""

from __future__ import annotations

import json
import os
import re
import sqlite3
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from filelock import FileLock, Timeout

from headwater.chat.journal import Journal, now
from headwater.database import FILE, data_dir, faults, open_database, writing
from headwater.errors import SessionBusy, UnknownName, UsageError

FOLDER = "sessions"
"""Where snapshots and locks lie, beside the database."""
LONGEST_NAME = 64
_NAME = re.compile(r"\w(?:[\w .-]*[\w-])?")
_RESERVED = {"con", "prn", "aux", "nul", *(f"{port}{n}" for port in ("com", "lpt") for n in range(1, 10))}


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A session in a list. `turns` are those of its latest chapter; `snapshot_bytes` is 0 where there is none."""

    name: str
    turns: int
    chapters: int
    model: str
    created: str
    updated: str
    snapshot_bytes: int
    open_in: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """The texts of a session, the user's and the answers in turn."""

    uid: str
    name: str
    system: str | None
    texts: tuple[str, ...]


@dataclass(slots=True, kw_only=True)
class Opened:
    """A session that is this process's own until it is closed."""

    name: str
    uid: str
    journal: Journal
    snapshot: Path
    folder: Path
    lock: FileLock | None
    connection: sqlite3.Connection

    @contextmanager
    def reading(self) -> Iterator[Journal]:
        """The journal to read from, even when the session was given back."""
        if self.lock is not None:
            yield self.journal
            return
        with closing(open_database(self.journal.path)) as connection:
            yield Journal(connection, self.journal.path, self.journal.id)

    def close(self) -> None:
        """Give it back."""
        self.connection.close()
        if self.lock is not None:
            _pid_file(self.folder, self.uid).unlink(missing_ok=True)
            self.lock.release()
            self.lock = None


class Store:
    """The sessions in one database; by default the user's own. Raises StoreError as `open_database` does."""

    def __init__(self, path: Path | str | None = None) -> None:
        self.path = Path(path).absolute() if path is not None else data_dir().absolute() / FILE
        self.folder = self.path.with_name(FOLDER if path is None else f"{self.path.stem}-{FOLDER}")

    def open(self, name: str, *, create: bool = True, exist: bool = True) -> Opened:
        """Take a session for this process, or begin one of that name.

        Raises UsageError for a name that cannot be one, UnknownName where it is not there and is not to be created,
        UsageError where it is there and must not be, SessionBusy while another process has it.
        """
        check_name(name)
        connection = open_database(self.path)
        try:
            with writing(connection, self.path):
                row = connection.execute("SELECT id, uid FROM sessions WHERE name = ?", (name,)).fetchone()
                if row is None and not create:
                    names = [found for (found,) in connection.execute("SELECT name FROM sessions")]
                    raise UnknownName("session", name, names)
                if row is not None and not exist:
                    raise UsageError(f"there is a session {name!r} already; take another name, or delete that one")
                if row is None:
                    uid, began = uuid.uuid4().hex, now()
                    row = connection.execute(
                        "INSERT INTO sessions (uid, name, chapter, settings, created, updated) "
                        "VALUES (?, ?, 0, '{}', ?, ?) RETURNING id, uid",
                        (uid, name, began, began),
                    ).fetchone()
            number, uid = row
            lock = self._lock(name, uid)
        except BaseException:
            connection.close()
            raise
        return Opened(
            name=name,
            uid=uid,
            journal=Journal(connection, self.path, number),
            snapshot=self.folder / f"{uid}.safetensors",
            folder=self.folder,
            lock=lock,
            connection=connection,
        )

    def list(self) -> list[Listed]:
        """Every session, the one used last first."""
        if not self.path.exists():
            return []
        connection = open_database(self.path)
        try:
            with faults(self.path):
                rows = connection.execute(
                    "SELECT name, uid, settings, created, updated, "
                    "(SELECT coalesce(max(number) + 1, 0) FROM turns WHERE session = id "
                    "AND chapter = sessions.chapter), "
                    "(SELECT count(*) FROM chapters WHERE session = id) FROM sessions ORDER BY updated DESC, id DESC"
                ).fetchall()
        finally:
            connection.close()
        return [
            Listed(
                name=name,
                turns=turns,
                chapters=chapters,
                model=json.loads(settings).get("model", ""),
                created=created,
                updated=updated,
                snapshot_bytes=_size(self.folder / f"{uid}.safetensors"),
                open_in=self._holder(uid),
            )
            for name, uid, settings, created, updated, turns, chapters in rows
        ]

    def said(self) -> Iterator[Said]:
        """What was said in the latest chapter of every session, the one used last at the end."""
        if not self.path.exists():
            return
        with closing(open_database(self.path)) as connection, faults(self.path):
            rows = connection.execute(
                "SELECT uid, name, system, text FROM sessions JOIN chapters ON chapters.session = sessions.id AND "
                "chapters.number = sessions.chapter LEFT JOIN turns ON turns.session = sessions.id AND "
                "turns.chapter = sessions.chapter ORDER BY sessions.updated, sessions.id, turns.number"
            )
            for (uid, name, system), turns in groupby(rows, key=lambda row: row[:3]):
                texts = tuple(text for *_, text in turns if text is not None)
                yield Said(uid=uid, name=name, system=system, texts=texts)

    @contextmanager
    def reading(self, name: str) -> Iterator[Opened]:
        """A session to read from, whoever has it; nothing may be written. Raises UnknownName."""
        with closing(open_database(self.path)) as connection:
            with faults(self.path):
                row = connection.execute("SELECT id, uid FROM sessions WHERE name = ?", (name,)).fetchone()
            if row is None:
                raise UnknownName("session", name, [listed.name for listed in self.list()[:5]])
            yield Opened(
                name=name,
                uid=row[1],
                journal=Journal(connection, self.path, row[0]),
                snapshot=self.folder / f"{row[1]}.safetensors",
                folder=self.folder,
                lock=None,
                connection=connection,
            )

    def rename(self, name: str, new: str) -> None:
        """Call a session something else. Raises as `open` does, UsageError where there is one of the new name."""
        check_name(new)
        opened = self.open(name, create=False)
        try:
            with writing(opened.connection, self.path):
                if opened.connection.execute("SELECT 1 FROM sessions WHERE name = ?", (new,)).fetchone():
                    raise UsageError(f"there is a session {new!r} already; take another name")
                opened.connection.execute("UPDATE sessions SET name = ? WHERE uid = ?", (new, opened.uid))
        finally:
            opened.close()

    def delete(self, name: str) -> None:
        """Delete a session with its files and what memory has of it, for good. Raises as `open` does."""
        opened = self.open(name, create=False)
        try:
            with writing(opened.connection, self.path):
                opened.connection.execute(
                    "DELETE FROM passages WHERE conversation > ? AND conversation < ?",
                    (f"{opened.uid}/", f"{opened.uid}0"),  # 0 comes after /
                )
                opened.connection.execute("DELETE FROM sessions WHERE uid = ?", (opened.uid,))
            opened.snapshot.unlink(missing_ok=True)
        finally:
            opened.close()
        (self.folder / f"{opened.uid}.lock").unlink(missing_ok=True)

    def _lock(self, name: str, uid: str) -> FileLock:
        """The system drops the lock of a process that dies, so a stale one needs no judgement."""
        with faults(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = FileLock(self.folder / f"{uid}.lock", mode=0o600)
            try:
                lock.acquire(timeout=0)
            except Timeout as error:
                who = self._pid(uid)
                raise SessionBusy(
                    f"session {name!r} is open in process {who or 'nobody knows which'}; close it there, or take "
                    "another session"
                ) from error
            _pid_file(self.folder, uid).write_text(str(os.getpid()))
            for half in self.folder.glob(f".{uid}.*.half"):  # of a process that was killed while it wrote
                half.unlink(missing_ok=True)
        return lock

    def _holder(self, uid: str) -> str | None:
        """The process that has a session open, if any."""
        lock = FileLock(self.folder / f"{uid}.lock", mode=0o600)
        if not _pid_file(self.folder, uid).exists():
            return None
        try:
            with lock.acquire(timeout=0):
                return None
        except (Timeout, OSError):
            return self._pid(uid)

    def _pid(self, uid: str) -> str:
        try:
            return _pid_file(self.folder, uid).read_text()
        except OSError:
            return ""


def check_name(name: str) -> None:
    """Raises UsageError for what cannot be the name of a session."""
    if len(name) > LONGEST_NAME or not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} cannot be the name of a session: letters, digits, spaces and . _ - inside, at most "
            f"{LONGEST_NAME} characters, and no path"
        )
    if name.split(".")[0].lower() in _RESERVED:
        raise UsageError(f"{name!r} is a name that some systems reserve; take another one")


def opened_session(session: str | Path | Opened, *, create: bool = True) -> Opened:
    """The session that a caller means: a name is one of the user's own, a Path a file that holds one of its stem."""
    if isinstance(session, Opened):
        return session
    if isinstance(session, Path):
        if not create and not session.exists():
            raise UsageError(f"{session} is not there; a session is begun with Chat.open(..., session=PATH)")
        return Store(session).open(session.stem, create=create)
    return Store().open(session, create=create)


def _pid_file(folder: Path, uid: str) -> Path:
    return folder / f"{uid}.pid"


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0
