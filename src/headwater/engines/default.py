"""Which engine runs a model when nobody says.

Knows what is installed and where a model lies. Imports no runtime, and loads nothing of a model.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from headwater.engines import llamacpp_library
from headwater.policies.base import Policy

PLAIN = "transformers"
"""What runs every model that it can read, under every policy."""

LIGHT = "llamacpp"
"""What runs a GGUF file as it is: a fifth of the memory of one that is unpacked."""


def default_engine(model: str, policy: Policy[Any]) -> str:
    """llama.cpp where it is installed, the model is a GGUF file and the policy keeps a window; else transformers."""
    there = llamacpp_library.installed() is not None and find_spec("jinja2") is not None
    return LIGHT if there and policy.windowed and _is_gguf(model) else PLAIN


def _is_gguf(model: str) -> bool:
    models = import_module("headwater.engines.models")
    if model in models.MODELS:
        return models.gguf_is_nearest(model)
    path = Path(model).expanduser()
    return path.is_file() and models.is_gguf(path)
