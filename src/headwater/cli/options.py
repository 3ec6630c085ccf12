"""What the commands share: kinds of arguments, options that mean the same everywhere, groups.

Knows click. Does not know any one command. The registries are read only when there is a name to check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from headwater.errors import InputFileError, UnknownName

READABLE = click.Path(exists=True, dir_okay=False, path_type=Path)
WRITABLE = click.Path(path_type=Path)


@dataclass(slots=True)
class Door:
    """What the program has to know after a command has failed."""

    debug: bool = False


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


class EngineName(click.ParamType):
    """An engine of the registry, with options of its own or without."""

    name = "engine"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from headwater.engines import split_engine

        split_engine(value)
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


class Spans(click.ParamType):
    """A comma list of whole numbers and of ranges, such as `0,5,10-20`."""

    name = "spans"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        numbers: list[int] = []
        for part in value.split(","):
            first, dash, last = part.strip().partition("-")
            ends = (first, last if dash else first)
            if not all(end.isascii() and end.isdigit() for end in ends) or int(ends[0]) > int(ends[1]):
                self.fail(f"{value!r} is not a comma list of whole numbers and ranges such as 0,5,10-20", param, ctx)
            numbers.extend(range(int(ends[0]), int(ends[1]) + 1))
        return tuple(numbers)


class Names(click.ParamType):
    """A comma list of names. Which names are known is for the library to say: some are no registry's."""

    name = "names"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        return value if isinstance(value, tuple) else tuple(part.strip() for part in value.split(","))


def policy_names() -> Iterable[str]:
    """The policies of the registry."""
    from headwater.policies import POLICIES

    return POLICIES


def _set_debug(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value:
        context.ensure_object(Door).debug = True


debug = click.option(
    "--debug", is_flag=True, expose_value=False, is_eager=True, callback=_set_debug, help="Show a traceback on errors."
)
model_option = click.option("--model", default="smollm2", help="A known name, a folder, a .gguf file or a hub id.")
engine_option = click.option(
    "--engine",
    type=EngineName(),
    default="transformers",
    help="What runs it, also with options: NAME:OPTION=VALUE,...  (see headwater engines)",
)
chosen_engine_option = click.option(
    "--engine",
    type=EngineName(),
    default=None,
    help="What runs it, also with options: NAME:OPTION=VALUE,...  (see headwater engines)  [default: llamacpp where it "
    "is installed, the model is a GGUF file and the policy keeps a window; else transformers]",
)
sinks_option = click.option("--sinks", type=click.IntRange(min=0), default=4, help="First tokens that always stay.")
seed_option = click.option("--seed", type=click.IntRange(min=0), default=0, help="Seed of everything random.")


def budget_option(default: int) -> Callable[[Any], Any]:
    """The option of that name, with a command's own default."""
    return click.option(
        "--budget", type=click.IntRange(min=1), default=default, help="Most tokens in the cache, all included."
    )


def was_given(context: click.Context, option: str) -> bool:
    """Whether the user wrote the option, or the value is its default."""
    return context.get_parameter_source(option) is ParameterSource.COMMANDLINE


def text_of(file: Path) -> str:
    """A file as text. Raises InputFileError when it is not UTF-8."""
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputFileError(f"{file} is not a UTF-8 text: {error.reason} at byte {error.start}") from error
