"""`headwater sessions`: what conversations are kept, and what can be done with them."""

from __future__ import annotations

from pathlib import Path

import click

from headwater.cli.options import READABLE, WRITABLE, Commands, debug
from headwater.cli.screen import print_columns
from headwater.errors import InputFileError, UsageError

NAME = click.argument("name")


@click.group(cls=Commands, invoke_without_command=True)
@debug
@click.pass_context
def sessions(context: click.Context) -> None:
    """Look after conversations that are kept.

    Alone, it lists them."""
    if context.invoked_subcommand is None:
        context.invoke(list_sessions)


@sessions.command("list")
@debug
def list_sessions() -> None:
    """List the sessions, the one used last first."""
    from headwater.chat.screen import size
    from headwater.chat.store import Store

    store = Store()
    found = store.list()
    if not found:
        click.echo("No sessions yet; headwater chat --session NAME begins one.", err=True)
        return
    rows = [("SESSION", "MODEL", "TURNS", "LAST USED", "SNAPSHOT", "OPEN IN")]
    for each in found:
        snapshot = size(each.snapshot_bytes) if each.snapshot_bytes else "none"
        used = each.updated[:16].replace("T", " ")
        rows.append((each.name, each.model or "any", f"{each.turns:,}", used, snapshot, each.open_in or "nothing"))
    print_columns(rows)
    click.echo(f"\nKept in {store.path}, readable by its owner alone and not encrypted.", err=True)


@sessions.command("show")
@NAME
@click.option("--last", type=click.IntRange(min=1), default=20, help="How many messages.")
@debug
def show_session(name: str, last: int) -> None:
    """Show the latest messages of a session."""
    from headwater.chat.store import Store

    opened = Store().open(name, create=False)
    try:
        chapter = opened.journal.chapter()
        if chapter is None:
            return
        if chapter.system is not None:
            click.echo(f"system: {chapter.system}\n")
        count = opened.journal.count(chapter.number)
        for entry in opened.journal.entries(chapter.number, max(0, count - last)):
            click.echo(f"{entry.turn.role}: {entry.turn.text}\n")
    finally:
        opened.close()


@sessions.command("export")
@NAME
@click.option("--format", "kind", type=click.Choice(["jsonl", "markdown"]), default="jsonl", help="How it is written.")
@click.option("--output", "-o", type=WRITABLE, help="A file that is not there yet.  [default: standard output]")
@debug
def export_session(name: str, kind: str, output: Path | None) -> None:
    """Write a session out, every message of it."""
    from headwater.chat.exchange import as_json_lines, as_markdown
    from headwater.chat.store import Store

    opened = Store().open(name, create=False)
    try:
        pieces, end = (as_json_lines(opened), "\n") if kind == "jsonl" else (as_markdown(opened), "\n\n")
        if output is None:
            for piece in pieces:
                click.echo(piece + end, nl=False)
            return
        try:
            with output.open("x", encoding="utf-8") as file:
                file.writelines(piece + end for piece in pieces)
        except FileExistsError as error:
            raise UsageError(f"{output} is there already; take another name") from error
    finally:
        opened.close()


@sessions.command("import")
@click.argument("file", type=READABLE)
@click.option("--name", help="What to call it.  [default: the file's name without its ending]")
@debug
def import_session(file: Path, name: str | None) -> None:
    """Make a session of a file of JSON lines.

    As export writes it, or with role and content alone.
    """
    from headwater.chat.exchange import import_json_lines
    from headwater.chat.store import Store

    called = name if name is not None else file.stem
    try:
        with file.open("rb") as lines:
            count = import_json_lines(Store(), called, lines, str(file))
    except OSError as error:
        raise InputFileError(f"{file} cannot be read: {error.strerror}") from error
    click.echo(f"Session {called}: {count:,} messages; headwater chat --session {called!r} goes on with it.")


@sessions.command("verify")
@NAME
@debug
def verify_session(name: str) -> int:
    """Check a session and its snapshot.

    Exit code 1 when something is wrong.
    """
    from headwater.chat.exchange import faults_of
    from headwater.chat.store import Store

    opened = Store().open(name, create=False)
    try:
        found = faults_of(opened)
    finally:
        opened.close()
    for fault in found:
        click.echo(fault)
    if not found:
        click.echo(f"Session {name} is sound.")
    return 1 if found else 0


@sessions.command("delete")
@NAME
@click.option("--yes", is_flag=True, help="Do not ask.")
@debug
def delete_session(name: str, yes: bool) -> None:
    """Delete a session for good."""
    from headwater.chat.store import Store, check_name

    check_name(name)
    if not yes and not click.confirm(f"Delete session {name} for good?"):
        click.echo("Nothing was deleted.")
        return
    Store().delete(name)
    click.echo(f"Session {name} is deleted.")
