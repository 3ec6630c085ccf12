"""Every policy live in generation, on the embedded model: `python -m bench.live`.

The result goes to `docs/results/live.json`, its figures are the last line printed, and `docs/live.md` takes its tables
and picture from there alone (`bench/live_page.py`).

- `speed`: `tokens_per_s_over_ring`, by policy: decode speed of a full cache of 512 tokens over that of the ring
  (streaming-llm), the rivals taking turns token by token in one process, medians.
- `kept`: `kept_sets_equal`: whether every head of three tiny models of other families keeps at every step, in float32,
  what a replay of that very attention keeps.
- `quality` (`bench/live_quality.py`): perplexity, retained attention mass, bytes, and the ranking beside replay's.
- `positions`: gaps closed or left, past the trained length.
- `needle` (`bench/needle.py`): which policies keep a fact inside a long prompt, at a quarter of its length.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from bench import live_page, needle
from bench.clock import take
from bench.live_quality import BOOK, measure_positions, measure_quality
from headwater.bench.machine import hardware, now, versions
from headwater.engines import open_engine
from headwater.engines.base import Engine, Stream
from headwater.policies import policy
from tests import tiny
from tests.cache.test_policy_cache import LOOKING, SMALL
from tests.reference.live_kept import live_and_replayed

PARTS = ("speed", "kept", "quality", "positions", "needle")
BUDGET, SINKS, ROUNDS, SETTLING = 512, 4, 60, 10
RING = "streaming-llm"
FAMILIES = ("llama", "qwen3", "glm4")


def measure_speed(engine: Engine) -> dict[str, Any]:
    """Seconds of a step in a full cache, by policy, the rivals taking turns."""
    tokens = engine.encode(BOOK.read_text(encoding="utf-8")[:8000])
    streams: dict[str, Stream] = {}
    for name in (RING, *LOOKING):
        streams[name] = engine.open(policy(name, budget=BUDGET, sinks=SINKS).live())
        streams[name].feed(tokens[: BUDGET + 40])
    took: dict[str, list[float]] = {name: [] for name in streams}
    for token in tokens[BUDGET + 40 :][: SETTLING + ROUNDS]:
        for name, stream in streams.items():
            began = time.perf_counter()
            stream.feed([token])
            took[name].append(time.perf_counter() - began)
    median = {name: statistics.median(each[SETTLING:]) for name, each in took.items()}
    bytes_held = {name: stream.nbytes for name, stream in streams.items()}
    for stream in streams.values():
        stream.close()
    return {
        "tokens_per_s_over_ring": {name: round(median[RING] / each, 4) for name, each in median.items()},
        "tokens_per_s": {name: round(1 / each, 2) for name, each in median.items()},
        "bytes_held": bytes_held,
        "threads": torch.get_num_threads(),
    }


def measure_kept(engine: Engine) -> dict[str, Any]:
    """Whether live and replayed kept sets are equal, over every head and step of three families."""
    tokens, heads, alike = tiny.tokens(90)[0].tolist(), 0, 0
    for family in FAMILIES:
        for name in LOOKING:
            choice = policy(name, budget=16, sinks=2, **SMALL[name])
            for live, replayed in live_and_replayed(tiny.build(family), choice, tokens, reindex="compact"):
                heads += len(live)
                alike += sum(a == b for a, b in zip(live, replayed, strict=True))
    return {"kept_sets_equal": heads == alike, "kept_sets_compared": heads, "kept_sets_alike": alike}


def main() -> None:
    """Measure, and print the figures; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="the others stay as they are stored")
    options = parser.parse_args()
    stored = live_page.STORED
    figures: dict[str, Any] = json.loads(stored.read_text(encoding="utf-8")) if stored.exists() else {}
    figures |= {"hardware": hardware(), "versions": versions(), "seed": 0}
    print(f"{figures['hardware']}\n{figures['versions']}")
    engine = open_engine("smollm2", engine="transformers")
    measures: dict[str, Callable[[Engine], dict[str, Any]]] = {
        "speed": measure_speed,
        "kept": measure_kept,
        "quality": measure_quality,
        "positions": measure_positions,
        "needle": needle.measure,
    }
    for part in options.parts:
        figures[f"{part}_started"] = now()
        take(figures, measures[part](engine))
        stored.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    if "quality" in figures and "tokens_per_s" in figures:
        live_page.main()
    print(json.dumps({name: value for name, value in figures.items() if name in live_page.ASKED}))


if __name__ == "__main__":
    main()
