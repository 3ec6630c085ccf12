"""What must work when Headwater is installed without any extra; a script, run by itself.

`make smoke` runs it on the installed wheel, `test_architecture.py` in this environment with the extras made invisible.
"""

from __future__ import annotations

import contextlib
import io
import sys
from dataclasses import fields
from importlib import import_module

import numpy as np

MODULES = (
    "headwater",
    "headwater.errors",
    "headwater.rotary",
    "headwater.policies",
    "headwater.engines",
    "headwater.engines.fake",
    "headwater.engines.listing",
    "headwater.traces",
    "headwater.memory",
    "headwater.chat",
    "headwater.cli",
)
EXTRAS = (
    "torch",
    "transformers",
    "safetensors",
    "accelerate",
    "gguf",
    "jinja2",
    "xllamacpp",
    "mlx",
    "mlx_lm",
    "matplotlib",
    "numba",
    "zarr",
    "wordllama",
    "tokenizers",
    "fastapi",
    "starlette",
    "uvicorn",
    "pydantic",
    "prometheus_client",
)


def main() -> None:
    for name in MODULES:
        import_module(name)

    import headwater as hw
    from headwater.memory import Passage

    chat = hw.Chat.open(hw.FakeEngine(), system="You are brief.", budget=128)
    answers = ["".join(chat.send(f"message {number}")) for number in range(12)]
    stats = chat.stats()
    check(all(answers), "the fake engine answered nothing")
    check(stats.held <= 128 < stats.seen, f"no eviction in a budget of 128 tokens: {stats}")
    chat.close()

    made = [hw.policy(name) for name in hw.POLICIES]
    check(all(field.name for policy in made for field in fields(policy)), "a policy has no parameters")

    kept = hw.replay(hw.canonical_trace(tokens=64), "h2o", budget=40)
    check((kept.way, kept.eviction_calls) == ("rule", 24), f"h2o was not replayed by its rule: {kept}")

    keys = np.zeros((1, 3, 100, 8))
    check(hw.sliding_window(keys, keys, window=32)[0].shape == (1, 3, 32, 8), "the textbook window kept something else")

    try:
        _ = hw.WindowCache
    except hw.HeadwaterError as error:
        check("pip install 'headwater[transformers]'" in str(error), f"it does not say what to install: {error}")
    else:
        check(False, "WindowCache was loaded without its extra")

    memory = hw.Memory(embedder=None)
    memory.remember([Passage(key="1", conversation="c", number=1, text="The boat is red.")])
    check(len(memory.recall("boat", conversation="c")) == 1, "memory found nothing by its words")
    memory.close()
    try:
        hw.Memory()
    except hw.HeadwaterError as error:
        check("pip install 'headwater[memory]'" in str(error), f"it does not say what to install: {error}")
    else:
        check(False, "vectors were made without the extra")
    from headwater import cli

    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code = cli.main(["serve", "--engine", "fake"])
    check(code == 1 and "pip install 'headwater[server]'" in said.getvalue(), f"serve said: {said.getvalue()}")
    check(not set(EXTRAS) & set(sys.modules), f"loaded all the same: {set(EXTRAS) & set(sys.modules)}")
    print("a base install works")


def check(true: bool, otherwise: str) -> None:
    if not true:
        sys.exit(otherwise)


if __name__ == "__main__":
    main()
