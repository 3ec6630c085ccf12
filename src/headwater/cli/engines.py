"""`headwater engines`: what can run a model here, and what brings the rest."""

from __future__ import annotations

import click

from headwater.cli.options import debug
from headwater.cli.screen import print_columns


@click.command()
@debug
def engines() -> None:
    """List the engines: what runs, and how to install it."""
    from headwater.engines.listing import listed

    rows = [("ENGINE", "STATE", "SUPPLIES", "RUNS")]
    for row in listed():
        state = f"ready: {row.found}" if row.found is not None else f"not installed; run: {row.install}"
        rows.append((row.name, state, ", ".join(row.about.supplies) or "nothing", row.about.runs))
    print_columns(rows)
