"""What engines there are, for people: what each runs, what it supplies, and the command that brings it.

Knows packages by their names. Imports no runtime: whether one is there is read from what is installed.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from headwater.engines import ENGINES, llamacpp_library, mlx_library

SESSIONS, ATTENTION = "sessions", "attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What is known of an engine without opening it. `extra` is None for one that needs nothing."""

    runs: str
    supplies: tuple[str, ...]
    packages: tuple[str, ...]
    extra: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """One line of the listing. `found` is what is installed of it; None when something is missing."""

    name: str
    about: About
    found: str | None
    install: str


ABOUT: dict[str, About] = {
    "transformers": About(
        runs="a known model, a folder, a hub id, a .gguf file (unpacked once)",
        supplies=(SESSIONS, ATTENTION),
        packages=("torch", "transformers", "accelerate", "gguf", "safetensors"),
        extra="transformers",
    ),
    "llamacpp": About(
        runs="a known model, a .gguf file as it is",
        supplies=(SESSIONS,),
        packages=(llamacpp_library.PACKAGE, "jinja2"),
        extra="llamacpp",
    ),
    "mlx": About(
        runs="a known model, a folder of safetensors, a .gguf file as it is",
        supplies=(SESSIONS,),
        packages=mlx_library.PACKAGES,
        extra=mlx_library.EXTRA,
    ),
    "fake": About(
        runs="no weights: arithmetic, for tests and trials", supplies=(SESSIONS, ATTENTION), packages=(), extra=None
    ),
}


def listed() -> list[Listed]:
    """Every engine, there or not, in the order of the registry."""
    return [
        Listed(
            name=name,
            about=ABOUT[name],
            found=_found(ABOUT[name]),
            install="" if ABOUT[name].extra is None else f"pip install 'headwater[{ABOUT[name].extra}]'",
        )
        for name in ENGINES
    ]


def _found(about: About) -> str | None:
    if not about.packages:
        return "built in"
    versions = [_version(package) for package in about.packages]
    if None in versions:
        return None
    main = 1 if about.packages[0] == "torch" else 0
    return f"{about.packages[main]} {versions[main]}"


def _version(package: str) -> str | None:
    if package == llamacpp_library.PACKAGE and (own := llamacpp_library.installed()) is not None:
        return own.removeprefix(f"{package} ")
    try:
        return version(package)
    except PackageNotFoundError:
        return None
