"""One seam, several runtimes. `ENGINES` names them; nothing heavy is imported until one is opened."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from inspect import Parameter, signature
from typing import Any

from headwater.engines.base import Engine, Evicted, Stream
from headwater.errors import UnknownName, UsageError

ENGINES: dict[str, str] = {
    "transformers": "headwater.engines.transformers:TransformersEngine",
    "llamacpp": "headwater.engines.llamacpp:LlamaCppEngine",
    "mlx": "headwater.engines.mlx:MlxEngine",
    "fake": "headwater.engines.fake:FakeEngine",
}
"""Name of the engine to `module:class`; the class has a classmethod `load(model: str, **options) -> Engine`."""


def open_engine(model: str, *, engine: str = "transformers", **options: Any) -> Engine:
    """Load `model` (a known name, a folder, a GGUF file or a hub id) with the named engine.

    `engine` may carry options of its own, as in `llamacpp:type_k=q8_0,n_threads=4`. Raises UnknownName for an unknown
    engine or option, UsageError for one given twice, MissingExtra when its runtime is not installed, ModelMissing when
    the model is not on this machine.
    """
    name, own = split_engine(engine)
    if twice := own.keys() & options.keys():
        raise UsageError(f"option {min(twice)!r} was given in {engine!r} and beside it; give it once")
    module, _, kind = ENGINES[name].partition(":")
    load = getattr(import_module(module), kind).load
    _check_options(name, load, own | options)
    return load(model, **own, **options)


def split_engine(engine: str) -> tuple[str, dict[str, str | int]]:
    """The name and the options of `NAME` or `NAME:OPTION=VALUE,...`; whole numbers become integers.

    Raises UnknownName for an unknown engine, UsageError for options that are not of that form.
    """
    name, _, rest = engine.partition(":")
    if name not in ENGINES:
        raise UnknownName("engine", name, ENGINES, also="NAME:OPTION=VALUE,...")
    options: dict[str, str | int] = {}
    for part in rest.split(",") if rest else ():
        option, equals, value = (each.strip() for each in part.partition("="))
        if not (option and equals and value) or option in options:
            raise UsageError(
                f"{part!r} in {engine!r} is not one OPTION=VALUE of its own; write {name}:OPTION=VALUE,..."
            )
        options[option] = int(value) if value.removeprefix("-").isdecimal() else value
    return name, options


def _check_options(engine: str, load: Callable[..., Engine], options: Mapping[str, Any]) -> None:
    known = signature(load).parameters
    if any(each.kind is Parameter.VAR_KEYWORD for each in known.values()):
        return  # it checks them itself
    names = [name for name, each in known.items() if each.kind is Parameter.KEYWORD_ONLY]
    for option in options:
        if option not in names:
            raise UnknownName(f"option of the engine {engine}", option, names)


__all__ = ["ENGINES", "Engine", "Evicted", "Stream", "open_engine"]
