"""`headwater chat`: a conversation on the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from headwater.cli.options import (
    READABLE,
    Name,
    budget_option,
    chosen_engine_option,
    debug,
    model_option,
    policy_names,
    sinks_option,
    text_of,
    was_given,
)
from headwater.errors import UsageError

WAYS = ("recall", "summary", "both")
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")


@click.command()
@model_option
@chosen_engine_option
@click.option("--session", metavar="NAME", help="Keep the conversation on the disk, and go on where it ended.")
@click.option(
    "--memory",
    type=click.Choice(WAYS),
    is_flag=False,
    flag_value="recall",
    default=None,
    help="Remember what leaves the cache: bring back what fits a message (recall; --memory alone is the same), let the "
    "model write notes on it while you type (summary), or both.  [default: none]",
)
@click.option("--memory-tokens", type=click.IntRange(min=48), default=256, help="Most tokens that recall may bring.")
@click.option("--summary-tokens", type=click.IntRange(min=48), default=128, help="Most tokens that notes may take.")
@click.option("--system", help="System prompt; pinned, so it is never forgotten.")
@click.option("--template", type=READABLE, help="Jinja chat template, for a model that has none.")
@click.option("--policy", type=Name("policy", policy_names), default="streaming-llm", help="What leaves a full cache.")
@budget_option(1024)
@sinks_option
@click.option("--temperature", type=float, default=0.7, help="0 is greedy.")
@click.option("--top-k", type=int, default=50, help="Draw from so many likeliest tokens; 0 is off.")
@click.option("--top-p", type=float, default=0.95, help="Draw from the likeliest of this joint probability; 1 is off.")
@click.option("--min-p", type=float, default=0.0, help="Least probability relative to the likeliest; 0 is off.")
@click.option("--repetition-penalty", type=float, default=1.1, help="Above 1 repeats less; 1 is off.")
@click.option("--seed", type=click.IntRange(min=0), default=None, help="Makes answers repeatable.  [default: none]")
@click.option("--greedy", is_flag=True, help="Always take the likeliest token; the same as --temperature 0.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=512, help="Longest answer.")
@click.option("--stop", multiple=True, metavar="TEXT", help="Text that ends an answer; repeatable.")
@debug
@click.pass_context
def chat(
    context: click.Context,
    session: str | None,
    memory: str | None,
    memory_tokens: int,
    summary_tokens: int,
    template: Path | None,
    greedy: bool,
    **options: Any,
) -> int:
    """Chat without end; piped, print the answers alone."""
    if greedy and was_given(context, "temperature"):
        raise UsageError("--greedy and --temperature cannot both be given; --greedy is --temperature 0")
    from headwater.policies import has_sinks

    if was_given(context, "sinks") and was_given(context, "policy") and not has_sinks(options["policy"]):
        raise UsageError(
            f"policy {options['policy']!r} has no sinks; leave --sinks out, or take --policy streaming-llm"
        )
    for name, ways in (("memory_tokens", ("recall", "both")), ("summary_tokens", ("summary", "both"))):
        if was_given(context, name) and memory not in ways:
            raise UsageError(f"--{name.replace('_', '-')} is for --memory {' and '.join(ways)}, which was not given")
    from headwater.chat.sampling import Sampling
    from headwater.chat.terminal import run

    given = {name: value for name, value in options.items() if session is None or was_given(context, name)}
    if not was_given(context, "sinks"):
        given.pop("sinks", None)  # every policy has its own default, or none
    drawing = {name: given.pop(name) for name in SAMPLING if name in given}
    if greedy:
        drawing["temperature"] = 0.0
    return run(
        session=session,
        memory=memory in ("recall", "both"),
        memory_tokens=memory_tokens,
        summary_tokens=summary_tokens if memory in ("summary", "both") else 0,
        template=None if template is None else text_of(template),
        sampling=Sampling(**drawing) if session is None else drawing,
        **{name: given.get(name) for name in options if name not in SAMPLING},
    )
