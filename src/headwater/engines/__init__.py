"""One seam, several runtimes. `ENGINES` names them; nothing heavy is imported until one is opened."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from headwater.engines.base import Engine, Evicted, Stream
from headwater.errors import UnknownName

ENGINES: dict[str, str] = {
    "transformers": "headwater.engines.transformers:TransformersEngine",
    "fake": "headwater.engines.fake:FakeEngine",
}
"""Name of the engine to `module:class`; the class has a classmethod `load(model: str, **options) -> Engine`."""


def open_engine(model: str, *, engine: str = "transformers", **options: Any) -> Engine:
    """Load `model` (a known name, a folder, a GGUF file or a hub id) with the named engine.

    Raises UnknownName for an unknown engine, MissingExtra when its runtime is not installed, ModelMissing when the
    model is not on this machine.
    """
    if engine not in ENGINES:
        raise UnknownName("engine", engine, ENGINES)
    module, _, name = ENGINES[engine].partition(":")
    return getattr(import_module(module), name).load(model, **options)


__all__ = ["ENGINES", "Engine", "Evicted", "Stream", "open_engine"]
