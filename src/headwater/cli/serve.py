"""`headwater serve` and `headwater keys`: the local server, and who may use it."""

from __future__ import annotations

import re
from typing import Any

import click

from headwater.cli.options import (
    Commands,
    Name,
    budget_option,
    chosen_engine_option,
    debug,
    model_option,
    policy_names,
)
from headwater.cli.screen import print_columns
from headwater.errors import MissingExtra, UsageError


@click.command()
@model_option
@chosen_engine_option
@click.option("--host", default="127.0.0.1", help="Address to listen on; any but this machine's own needs a key.")
@click.option("--port", type=click.IntRange(0, 65535), default=8420, help="Port; 0 is any that is free.")
@click.option("--policy", type=Name("policy", policy_names), default="streaming-llm", help="What leaves a full cache.")
@budget_option(1024)
@click.option("--sinks", type=click.IntRange(min=0), help="First tokens that always stay.  [default: the policy's]")
@click.option("--max-tokens", type=click.IntRange(min=1), default=512, help="Longest answer, if not asked otherwise.")
@click.option("--memory", is_flag=True, help="Keep what leaves the caches, and bring back what fits a message.")
@click.option("--memory-limit", default="1GiB", help="Memory for the caches of all sessions.")
@click.option("--timeout", type=click.FloatRange(min=1), default=600.0, help="Seconds that an answer may take.")
@click.option("--allow-origin", multiple=True, metavar="ORIGIN", help="A page that may use it; repeatable.")
@click.option("--allow-host", multiple=True, metavar="NAME", help="A name that it is addressed by; repeatable.")
@click.option("--requests-per-minute", type=click.IntRange(min=1), default=600, help="Most requests of a key.")
@click.option("--tokens-in-flight", type=click.IntRange(min=1), default=65536, help="Most tokens under way, of a key.")
@click.option("--sessions", type=click.IntRange(min=1), default=10000, help="Most sessions kept, of a key.")
@click.option("--verbose", is_flag=True, help="Log what happens; never what is said.")
@debug
def serve(
    requests_per_minute: int,
    tokens_in_flight: int,
    sessions: int,
    memory_limit: str,
    timeout: float,
    allow_origin: tuple[str, ...],
    allow_host: tuple[str, ...],
    verbose: bool,
    **options: Any,
) -> int:
    """Serve conversations to OpenAI clients, with a page."""
    for origin in allow_origin:
        if not re.fullmatch(r"https?://[^/\s*]+", origin):
            raise UsageError(f"{origin!r} is not the origin of a page, such as http://localhost:3000")
    from headwater.bench.sizes import parse_bytes

    try:
        from headwater.server.limits import Limits
        from headwater.server.serve import log_to_stderr, run
    except ModuleNotFoundError as error:
        raise MissingExtra(error.name or "fastapi", "server") from error
    log_to_stderr(verbose=verbose)
    return run(
        memory_bytes=parse_bytes(memory_limit),
        timeout_s=timeout,
        origins=allow_origin,
        hosts=allow_host,
        limits=Limits(requests_per_minute=requests_per_minute, tokens_in_flight=tokens_in_flight, sessions=sessions),
        **options,
    )


@click.group(cls=Commands, invoke_without_command=True)
@debug
@click.pass_context
def keys(context: click.Context) -> None:
    """Look after who may use the server.

    Alone, it lists the keys."""
    if context.invoked_subcommand is None:
        context.invoke(list_keys)


@keys.command("list")
@debug
def list_keys() -> None:
    """List the names of the keys."""
    from headwater.server.keys import Keys

    found = Keys().all()
    if not found:
        click.echo("No keys; the server takes requests of this machine alone.", err=True)
        return
    print_columns([("KEY", "MADE"), *((key.name, key.created[:16].replace("T", " ")) for key in found)])


@keys.command("add")
@click.argument("name")
@debug
def add_key(name: str) -> None:
    """Make a key and show it, this once.

    From now on the server asks for one. Every key has sessions of its own.
    """
    from headwater.server.keys import Keys

    click.echo(Keys().add(name))
    click.echo("Keep it; it is stored as a digest and cannot be shown again.", err=True)


@keys.command("remove")
@click.argument("name")
@debug
def remove_key(name: str) -> None:
    """Forget a key; its sessions stay on the disk."""
    from headwater.server.keys import Keys

    Keys().remove(name)
    click.echo(f"Key {name} is gone.")
