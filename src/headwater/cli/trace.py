"""`headwater trace`: record a model's attention, and see what a recording holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from headwater.cli.options import READABLE, WRITABLE, Commands, Spans, debug, engine_option, model_option


@click.group(cls=Commands, invoke_without_command=True)
@debug
@click.pass_context
def trace(context: click.Context) -> None:
    """Record attention, and see what was recorded."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@trace.command()
@model_option
@engine_option
@click.option("--text", type=READABLE, required=True, help="The UTF-8 text to read.")
@click.option("--tokens", type=click.IntRange(min=2), help="How much of it.  [default: all, at most 2048]")
@click.option("-o", "--output", type=WRITABLE, required=True, help="Folder to record into, or to go on in.")
@click.option("--layers", type=Spans(), help="Such as 0,5,10-20.  [default: all]")
@click.option("--heads", type=Spans(), help="In each layer, such as 0-3.  [default: all]")
@click.option(
    "--dtype", type=click.Choice(["float16", "float32"]), default="float16", help="What weights are stored as."
)
@click.option("--memory", default="512MB", help="The most to use, beside the model.")
@debug
def record(**options: Any) -> int:
    """Record what a model attends to over a text.

    All layers and heads, or those named. A recording that was stopped goes on when the same command is given again.
    """
    from headwater.bench.recording import run

    return run(**options)


@trace.command()
@click.argument("folder", type=click.Path(path_type=Path))
@debug
def info(folder: Path) -> int:
    """Show what the recording in FOLDER holds."""
    from headwater.bench.recording import show

    return show(folder)
