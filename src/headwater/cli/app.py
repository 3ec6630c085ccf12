"""The program: the list of its commands, and how an error of any of them reaches the terminal.

Knows exit codes. Does not know what a command does.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence

import click

from headwater import __version__
from headwater.cli import advise, chat, engines, measure, memory, models, policies, replay, serve, sessions, trace
from headwater.cli.options import Commands, Door, debug
from headwater.errors import HeadwaterError, UsageError

COMMANDS: tuple[click.Command, ...] = (
    advise.advise,
    chat.chat,
    engines.engines,
    serve.keys,
    measure.compare,
    measure.stream,
    memory.memory,
    models.models,
    policies.policies,
    replay.replay,
    serve.serve,
    sessions.sessions,
    trace.trace,
)
SETTINGS = {"help_option_names": ["-h", "--help"], "show_default": True, "max_content_width": 100}
DONE, FAILED, WRONG_USAGE, INTERRUPTED = 0, 1, 2, 130


@click.group(cls=Commands, context_settings=SETTINGS, invoke_without_command=True)
@click.version_option(__version__, prog_name="headwater", message="%(prog)s %(version)s")
@debug
@click.pass_context
def headwater(context: click.Context) -> None:
    """Keep a language model's conversation going for ever in a fixed amount of KV cache."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


for command in COMMANDS:
    headwater.add_command(command)


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
