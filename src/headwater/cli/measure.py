"""`headwater compare` and `headwater stream`: measurements on a model."""

from __future__ import annotations

from typing import Any

import click

from headwater.cli.options import (
    READABLE,
    WRITABLE,
    Names,
    Numbers,
    budget_option,
    debug,
    engine_option,
    model_option,
    seed_option,
    sinks_option,
)


@click.command()
@model_option
@engine_option
@click.option("--conversation", type=READABLE, help="JSONL or plain text.  [default: the bundled 202-turn dialogue]")
@click.option("--output", type=WRITABLE, default="report", help="Folder for results.json and index.html.")
@budget_option(512)
@sinks_option
@click.option(
    "--policies",
    type=Names(),
    default="full,sliding-window,streaming-llm,streaming-llm-turns",
    help="Comma list of the rows to measure.",
)
@click.option("--limit-tokens", type=click.IntRange(min=1), default=4096, help="Where a session without a policy ends.")
@click.option("--turns", type=click.IntRange(min=1), default=None, help="Only the first so many.  [default: all]")
@seed_option
@click.option("--system", help="System prompt, pinned.")
@debug
def compare(**options: Any) -> int:
    """Compare policies on a model and a conversation."""
    from headwater.bench.compare import run

    return run(**options)


@click.command()
@click.argument("text", type=READABLE)
@model_option
@engine_option
@click.option("--output", type=WRITABLE, default="report/stream.json", help="File for the results.")
@click.option("--tokens", type=click.IntRange(min=1), default=4096, help="How much of the text to read.")
@click.option("--budgets", type=Numbers(1), default="64,128,256,512", help="Budgets to compare.")
@click.option("--sinks", type=Numbers(0), default="0,1,2,4,8", help="Numbers of sinks to compare.")
@click.option("--gaps", type=Numbers(0), default="0,8192,16384,65536,1048576", help="Positions to skip.")
@seed_option
@debug
def stream(**options: Any) -> int:
    """Measure a long TEXT by budget, sinks and gaps.

    Perplexity along the text for every budget and number of sinks, and for one window whose positions jump by a gap:
    re-indexed against left where they were.
    """
    from headwater.bench.stream import run

    return run(**options)
