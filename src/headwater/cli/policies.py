"""`headwater policies`: the registry as a list."""

from __future__ import annotations

from dataclasses import fields

import click

from headwater.cli.options import debug
from headwater.cli.screen import print_columns


@click.command()
@debug
def policies() -> None:
    """List the policies: what each keeps, needs and takes."""
    from headwater.policies import POLICIES

    rows = [("POLICY", "KEEPS", "NEEDS", "PARAMETERS")]
    for name, kind in POLICIES.items():
        made = kind()
        parameters = ", ".join(f"{field.name}={getattr(made, field.name)}" for field in fields(kind))
        rows.append((name, made.summary, ", ".join(sorted(made.needs)) or "nothing", parameters or "none"))
    print_columns(rows)
