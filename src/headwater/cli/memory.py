"""`headwater memory`: documents that a chat with memory can bring back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from headwater.cli.options import READABLE, Commands, debug
from headwater.cli.screen import print_columns
from headwater.errors import UnknownName

if TYPE_CHECKING:
    from headwater.memory import Memory


@click.group(cls=Commands, invoke_without_command=True)
@debug
@click.pass_context
def memory(context: click.Context) -> None:
    """Look after what chats can recall.

    Alone, it lists the documents.
    """
    if context.invoked_subcommand is None:
        context.invoke(list_documents)


@memory.command("add")
@click.argument("file", type=READABLE)
@click.option("--name", help="What to call it.  [default: the file's name]")
@debug
def add_document(file: Path, name: str | None) -> None:
    """Index a text file."""
    from headwater.memory.words import clean

    called = clean(file.name if name is None else name)
    with _memory() as kept:
        earlier = dict(kept.documents()).get(called)
        count = kept.add_document(file, name=called)
    instead = "" if earlier is None else f", in the place of {earlier:,}"
    click.echo(f"{called}: {count:,} pieces{instead}; headwater chat --memory brings them where they fit.")


@memory.command("list")
@debug
def list_documents() -> None:
    """List the documents."""
    with _memory(words_alone=True) as kept:
        found = kept.documents()
    if not found:
        click.echo("No documents yet; headwater memory add FILE indexes one.", err=True)
        return
    print_columns([("DOCUMENT", "PIECES"), *((name, f"{count:,}") for name, count in found)])


@memory.command("search")
@click.argument("text")
@click.option("--limit", type=click.IntRange(min=1), default=5, help="How many pieces.")
@debug
def search_documents(text: str, limit: int) -> None:
    """Search the documents."""
    from headwater.chat.recalling import origin

    with _memory() as kept:
        found = kept.recall(text, conversation="", limit=limit)
    if not found:
        click.echo("Nothing was found.", err=True)
    for each in found:
        click.echo(f"{origin(each.passage)}\n{each.passage.text}\n")


@memory.command("forget")
@click.argument("name")
@debug
def forget_document(name: str) -> None:
    """Drop a document."""
    from headwater.memory.words import clean

    with _memory(words_alone=True) as kept:
        count = kept.forget(name)
        if not count:
            raise UnknownName("document", name, [known for known, _ in kept.documents()])
    click.echo(f"{clean(name)} is forgotten, {count:,} pieces.")


@contextmanager
def _memory(*, words_alone: bool = False) -> Iterator[Memory]:
    """The user's own memory; `words_alone` where nothing is searched or added, so that no extra is needed."""
    from headwater.chat.store import Store
    from headwater.memory import Memory

    kept = Memory(Store().path, embedder=None if words_alone else "auto")
    try:
        yield kept
    finally:
        kept.close()
        for notice in kept.notices:
            click.echo(notice, err=True)
