"""`headwater advise`: which policy, budget and recent window suit one's own conversation."""

from __future__ import annotations

from typing import Any

import click

from headwater.cli.options import READABLE, WRITABLE, debug, engine_option, model_option, seed_option


@click.command()
@model_option
@engine_option
@click.option("--conversation", type=READABLE, help="JSONL or plain text.  [default: the bundled 202-turn dialogue]")
@click.option("--memory", help="The most that keys, values and state may take, such as 512MB.")
@click.option(
    "--budget", type=click.IntRange(min=1), help="Most tokens in the cache.  [default: where the curve bends]"
)
@click.option("--turns", type=click.IntRange(min=1), help="Only the first so many.  [default: all]")
@click.option(
    "--sinks", type=click.IntRange(min=0), help="First tokens that always stay.  [default: each policy's own]"
)
@seed_option
@click.option("--output", type=WRITABLE, default="report/advise", help="Folder for advice.json and index.html.")
@debug
def advise(**options: Any) -> int:
    """Advise on policy, budget and recent window.

    Shows every policy what the model attends to in a conversation, and says which to take in a memory, at a budget, or
    where more tokens begin to buy less, and what that costs in bytes and in attention.
    """
    from headwater.bench.advise import run

    return run(**options)
