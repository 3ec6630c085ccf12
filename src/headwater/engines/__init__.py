"""One seam, several runtimes. `ENGINES` names them; nothing heavy is imported until one is opened."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from inspect import Parameter, signature
from typing import Any

from headwater.engines.base import Engine, Evicted, Stream
from headwater.errors import UnknownName

ENGINES: dict[str, str] = {
    "transformers": "headwater.engines.transformers:TransformersEngine",
    "llamacpp": "headwater.engines.llamacpp:LlamaCppEngine",
    "fake": "headwater.engines.fake:FakeEngine",
}
"""Name of the engine to `module:class`; the class has a classmethod `load(model: str, **options) -> Engine`."""


def open_engine(model: str, *, engine: str = "transformers", **options: Any) -> Engine:
    """Load `model` (a known name, a folder, a GGUF file or a hub id) with the named engine.

    Raises UnknownName for an unknown engine or option, MissingExtra when its runtime is not installed, ModelMissing
    when the model is not on this machine.
    """
    if engine not in ENGINES:
        raise UnknownName("engine", engine, ENGINES)
    module, _, name = ENGINES[engine].partition(":")
    load = getattr(import_module(module), name).load
    _check_options(engine, load, options)
    return load(model, **options)


def _check_options(engine: str, load: Callable[..., Engine], options: Mapping[str, Any]) -> None:
    known = signature(load).parameters
    if any(each.kind is Parameter.VAR_KEYWORD for each in known.values()):
        return  # it checks them itself
    names = [name for name, each in known.items() if each.kind is Parameter.KEYWORD_ONLY]
    for option in options:
        if option not in names:
            raise UnknownName(f"option of the engine {engine}", option, names)


__all__ = ["ENGINES", "Engine", "Evicted", "Stream", "open_engine"]
