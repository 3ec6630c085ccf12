"""The user's database: made, migrated, refused."""

from __future__ import annotations

import sqlite3
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headwater import database
from headwater.database import APPLICATION_ID, MIGRATIONS, open_database, transaction
from headwater.errors import StoreError

OLD = "CREATE TABLE kept (text TEXT) STRICT;"
NEW = "ALTER TABLE kept ADD COLUMN more TEXT;\nCREATE TABLE added (n INTEGER) STRICT;"


def test_a_new_database_is_its_owners_alone_and_safe_when_a_commit_returns(tmp_path: Path):
    path = tmp_path / "deep" / "headwater.db"
    connection = open_database(path)
    connection.execute("INSERT INTO sessions VALUES (1, 'a', 'b', 1, '{}', '', '')")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.with_name("headwater.db-wal").stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert connection.execute("PRAGMA synchronous").fetchone() == (2,)
    assert connection.execute("PRAGMA user_version").fetchone() == (len(MIGRATIONS),)
    with pytest.raises(sqlite3.IntegrityError, match="FOREIGN KEY"):
        connection.execute("INSERT INTO chapters VALUES (7, 1, NULL, NULL, NULL, '')")


def test_an_older_one_is_migrated_and_a_copy_kept(tmp_path: Path):
    path = tmp_path / "x.db"
    first = open_database(path, migrations=(OLD,))
    first.execute("INSERT INTO kept VALUES ('said')")
    first.close()
    second = open_database(path, migrations=(OLD, NEW))
    assert second.execute("SELECT text, more FROM kept").fetchall() == [("said", None)]
    copy = sqlite3.connect(tmp_path / "x.db.schema-1")
    assert copy.execute("SELECT * FROM kept").fetchall() == [("said",)]
    assert copy.execute("PRAGMA user_version").fetchone() == (1,)
    assert stat.S_IMODE((tmp_path / "x.db.schema-1").stat().st_mode) == 0o600
    copy.close()


def test_a_migration_that_fails_leaves_the_older_one(tmp_path: Path):
    path = tmp_path / "x.db"
    open_database(path, migrations=(OLD,)).close()
    with pytest.raises(StoreError, match="no such table: nowhere"):
        open_database(path, migrations=(OLD, NEW + "\nDROP TABLE nowhere;"))
    again = open_database(path, migrations=(OLD,))
    assert again.execute("SELECT name FROM sqlite_schema").fetchall() == [("kept",)]


def test_a_newer_one_is_refused_and_left_alone(tmp_path: Path):
    path = tmp_path / "x.db"
    open_database(path, migrations=(OLD, NEW)).close()
    before = path.read_bytes()
    with pytest.raises(StoreError, match="has schema 2, and this version of Headwater knows none after 1"):
        open_database(path, migrations=(OLD,))
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"not a database at all, but long enough to be looked at" * 40, "no SQLite database"),
        (b"SQLite format 3\0" + bytes(4080), "database"),
    ],
)
def test_a_file_that_is_no_database_is_refused_and_left_alone(tmp_path: Path, content: bytes, said: str):
    path = tmp_path / "x.db"
    path.write_bytes(content)
    with pytest.raises(StoreError, match=said):
        open_database(path)
    assert path.read_bytes() == content


def test_a_database_of_another_program_is_refused_and_left_alone(tmp_path: Path):
    path = tmp_path / "x.db"
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE theirs (x)")
    other.close()
    before = path.read_bytes()
    with pytest.raises(StoreError, match="another program"):
        open_database(path)
    assert path.read_bytes() == before


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be used"):
        open_database(tmp_path / "file" / "x.db")


def test_a_transaction_is_whole_or_not_at_all(tmp_path: Path):
    connection = open_database(tmp_path / "x.db", migrations=(OLD,))
    with pytest.raises(RuntimeError), transaction(connection):
        connection.execute("INSERT INTO kept VALUES ('a')")
        with transaction(connection):
            connection.execute("INSERT INTO kept VALUES ('b')")
        raise RuntimeError
    assert connection.execute("SELECT count(*) FROM kept").fetchone() == (0,)


def test_two_processes_migrate_one_file_once(tmp_path: Path):
    """Both open it at the same moment; with a second migration applied twice, one would fail."""
    path = tmp_path / "x.db"
    open_database(path, migrations=(OLD,)).close()
    at = time.time() + 1.5
    program = (
        f"import time; from pathlib import Path; from headwater.database import open_database\n"
        f"while time.time() < {at}: pass\n"
        f"open_database(Path({str(path)!r}), migrations=({OLD!r}, {NEW!r})).close()"
    )
    runs = [subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE) for _ in range(3)]
    assert [run.communicate()[1] for run in runs] == [b""] * 3


def test_the_statements_of_a_script_may_hold_triggers():
    script = "CREATE TABLE t (x);\nCREATE TRIGGER g AFTER INSERT ON t BEGIN\n  SELECT 1;\n  SELECT 2;\nEND;\nSELECT 3"
    assert len(list(database._statements(script))) == 3
    assert APPLICATION_ID < 2**31
