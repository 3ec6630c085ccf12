"""`headwater replay`: policies over a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from headwater.cli.options import WRITABLE, Names, Numbers, Spans, debug, was_given


@click.command()
@click.option("--trace", default="canonical", metavar="canonical|FOLDER", help="The canonical or a recorded trace.")
@click.option("--policies", type=Names(), default="all,random", help="Comma list; beyond all: random, full, oracle.")
@click.option("--budgets", type=Numbers(1), default="256,512,1024", help="Comma list of tokens to keep.")
@click.option("--sinks", type=click.IntRange(min=0), help="For the policies that take it.  [default: their own]")
@click.option(
    "--recent-window", type=click.IntRange(min=0), help="For the policies that take it.  [default: their own]"
)
@click.option("--seed", type=click.IntRange(min=0), help="For the policy random.  [default: its own]")
@click.option("--tokens", type=click.IntRange(min=2), help="Only the first so many of the trace.  [default: all]")
@click.option("--layers", type=Spans(), help="The layers to replay, such as 0,5,10-20.  [default: all]")
@click.option("--heads", type=Spans(), help="The heads to replay in each layer, such as 0-3.  [default: all]")
@click.option("--output", type=WRITABLE, default="report/replay", help="Folder for results.json and index.html.")
@click.option("--json", "as_json", is_flag=True, help="Print the JSON, and write it only into an --output given.")
@debug
@click.pass_context
def replay(context: click.Context, output: Path, as_json: bool, **options: Any) -> int:
    """Replay policies over a trace of attention.

    What each would have kept, at each budget, and how much of the attention that was worth. The trace is the canonical
    one, or a folder that `headwater trace record` made.
    """
    from headwater.bench.replay import run

    silent = as_json and not was_given(context, "output")
    return run(output=None if silent else output, as_json=as_json, **options)
