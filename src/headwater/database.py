"""The user's database: one SQLite file that holds every conversation and what memory knows of them.

Knows the file: where it is, who may read it, its schema and how an older one becomes this one. Does not know what the
rows mean. The tables are described here, in one place, because one number says which of them a file has.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import platformdirs

from headwater.errors import StoreError

DATA_VARIABLE = "HEADWATER_DATA_DIR"
FILE = "headwater.db"
APPLICATION_ID = 0x48775472
"""What SQLite's header says this file is for, so that no other program's database is taken for one."""
WAIT_S = 10.0
"""How long to wait for another process that is writing."""

JOURNAL = """
CREATE TABLE sessions (
    id INTEGER PRIMARY KEY,
    uid TEXT NOT NULL UNIQUE,
    name TEXT NOT NULL UNIQUE,
    chapter INTEGER NOT NULL,
    settings TEXT NOT NULL,
    created TEXT NOT NULL,
    updated TEXT NOT NULL
) STRICT;
CREATE TABLE chapters (
    session INTEGER NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    number INTEGER NOT NULL,
    system TEXT,
    wording TEXT,
    head BLOB,
    created TEXT NOT NULL,
    PRIMARY KEY (session, number)
) STRICT;
CREATE TABLE turns (
    session INTEGER NOT NULL,
    chapter INTEGER NOT NULL,
    number INTEGER NOT NULL,
    role TEXT NOT NULL,
    text TEXT NOT NULL,
    start INTEGER NOT NULL,
    stop INTEGER NOT NULL,
    ids BLOB NOT NULL,
    finished INTEGER NOT NULL,
    evicted_tokens INTEGER NOT NULL,
    evicted_turns INTEGER NOT NULL,
    gone_tokens INTEGER NOT NULL,
    created TEXT NOT NULL,
    details TEXT NOT NULL,
    PRIMARY KEY (session, chapter, number),
    FOREIGN KEY (session, chapter) REFERENCES chapters (session, number) ON DELETE CASCADE
) STRICT;
"""

MEMORY = """
CREATE TABLE passages (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    key TEXT NOT NULL UNIQUE,
    conversation TEXT NOT NULL,
    source TEXT NOT NULL,
    number INTEGER NOT NULL,
    text TEXT NOT NULL,
    context TEXT NOT NULL,
    said TEXT NOT NULL,
    embedder TEXT NOT NULL,
    vector BLOB
) STRICT;
CREATE INDEX passages_in_order ON passages (conversation, source, number);
CREATE INDEX passages_by_embedder ON passages (embedder, id);
CREATE VIRTUAL TABLE passage_words USING fts5 (
    text, context, content = 'passages', content_rowid = 'id', tokenize = 'porter unicode61'
);
CREATE TRIGGER passages_added AFTER INSERT ON passages BEGIN
    INSERT INTO passage_words (rowid, text, context) VALUES (new.id, new.text, new.context);
END;
CREATE TRIGGER passages_gone AFTER DELETE ON passages BEGIN
    INSERT INTO passage_words (passage_words, rowid, text, context) VALUES ('delete', old.id, old.text, old.context);
END;
"""

WORDS = """
DROP TRIGGER passages_added;
DROP TRIGGER passages_gone;
DROP TABLE passage_words;
ALTER TABLE passages DROP COLUMN context;
CREATE VIRTUAL TABLE passage_words USING fts5 (
    text, content = 'passages', content_rowid = 'id', tokenize = 'porter unicode61'
);
CREATE VIRTUAL TABLE passage_terms USING fts5vocab (passage_words, row);
CREATE VIRTUAL TABLE passage_occurrences USING fts5vocab (passage_words, instance);
CREATE TRIGGER passages_added AFTER INSERT ON passages BEGIN
    INSERT INTO passage_words (rowid, text) VALUES (new.id, new.text);
END;
CREATE TRIGGER passages_gone AFTER DELETE ON passages BEGIN
    INSERT INTO passage_words (passage_words, rowid, text) VALUES ('delete', old.id, old.text);
END;
INSERT INTO passage_words (passage_words) VALUES ('rebuild');
"""

NOTES = """
CREATE TABLE notes (
    session INTEGER NOT NULL,
    chapter INTEGER NOT NULL,
    last INTEGER NOT NULL,
    first INTEGER NOT NULL,
    text TEXT NOT NULL,
    created TEXT NOT NULL,
    PRIMARY KEY (session, chapter, last),
    FOREIGN KEY (session, chapter) REFERENCES chapters (session, number) ON DELETE CASCADE
) STRICT;
"""

MIGRATIONS: tuple[str, ...] = (JOURNAL, MEMORY, WORDS, NOTES)
"""What makes each version of the schema out of the one before; the version of a file is how many were applied."""


def data_dir() -> Path:
    """Where the user's conversations are kept: `HEADWATER_DATA_DIR`, or the user's data directory."""
    given = os.environ.get(DATA_VARIABLE)
    return Path(given) if given else Path(platformdirs.user_data_dir("headwater"))


def open_database(path: Path, *, migrations: Sequence[str] = MIGRATIONS) -> sqlite3.Connection:
    """The database in a file, made or brought up to date if need be.

    A commit is on the disk when it returns. An older file is copied to `NAME.schema-N` before it is changed. Files are
    made for their owner alone (mode 0600). Raises StoreError for a file that is no database of ours, is damaged, is
    newer than this version knows, or cannot be written.
    """
    path = path.absolute()
    with faults(path):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        connection = sqlite3.connect(path, timeout=WAIT_S, isolation_level=None, check_same_thread=False)
        try:
            _identify(connection, path, migrations)
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA foreign_keys = ON")
            _migrate(connection, path, migrations)
        except BaseException:
            connection.close()
            raise
    return connection


@contextmanager
def faults(path: Path) -> Iterator[None]:
    """Tell what the system or SQLite says of this file as a StoreError."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"{error.filename or path} cannot be used: {error.strerror}") from error
    except sqlite3.Error as error:
        kind = getattr(error, "sqlite_errorname", "") or type(error).__name__
        advice = {
            "SQLITE_FULL": "make room on the disk, and it goes on",
            "SQLITE_BUSY": f"another process has been writing it for {WAIT_S:.0f} seconds; try again",
            "SQLITE_READONLY": "its file or folder is read-only; allow writing, or take another folder",
            "SQLITE_CANTOPEN": "its folder may be read-only; allow writing, or take another folder",
            "SQLITE_NOTADB": "the file is no SQLite database, or its beginning was overwritten",
            "SQLITE_CORRUPT": "the file is damaged; move it away, or bring back a copy",
        }
        said = next((text for name, text in advice.items() if kind.startswith(name)), "")
        raise StoreError(f"{path}: {error} ({kind}){'; ' + said if said else ''}") from error


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """All of what is written inside, or nothing. Inside another one, a part of that."""
    if connection.in_transaction:
        yield
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


@contextmanager
def writing(connection: sqlite3.Connection, path: Path) -> Iterator[None]:
    """A transaction whose faults are told as those of the file."""
    with faults(path), transaction(connection):
        yield


def _identify(connection: sqlite3.Connection, path: Path, migrations: Sequence[str]) -> None:
    """Refuse what is not ours before anything is written into it."""
    (found,) = connection.execute("PRAGMA application_id").fetchone()
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    if found != APPLICATION_ID and (found or tables):
        raise StoreError(f"{path} is a database of another program; take another file")
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > len(migrations):
        raise StoreError(
            f"{path} has schema {version}, and this version of Headwater knows none after {len(migrations)}; "
            "it was written by a newer one: upgrade with pip install -U headwater"
        )


def _migrate(connection: sqlite3.Connection, path: Path, migrations: Sequence[str]) -> None:
    """Apply what is missing, each step whole or not at all, whoever else tries the same."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version == len(migrations):
        return
    if version:
        _keep_copy(connection, path.with_name(f"{path.name}.schema-{version}"))
    with transaction(connection):
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        for script in migrations[version:]:
            for statement in _statements(script):
                connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {len(migrations)}")


def _keep_copy(connection: sqlite3.Connection, copy: Path) -> None:
    """Copy the whole database into a file of its own."""
    half = copy.with_name(f"{copy.name}.{os.getpid()}.half")
    os.close(os.open(half, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600))
    target = sqlite3.connect(half)
    try:
        connection.backup(target)
        target.execute("PRAGMA journal_mode = DELETE")
    finally:
        target.close()
    half.replace(copy)


def _statements(script: str) -> Iterator[str]:
    """The statements of a script, one by one: `executescript` would commit between them."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
    if statement.strip():
        yield statement
