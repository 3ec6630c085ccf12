"""What K and V in int8 cost: perplexity, bytes and time over those in full precision: `python -m bench.int8`.

Both caches run in one process on the same tokens; decoding alternates step by step, so that what else the machine does
falls on both. The result goes to `docs/results/int8.json`, and its figures are the last line printed.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.clock import take, timed
from headwater.bench.machine import hardware, now, versions
from headwater.cache.adapter import WindowCache
from headwater.engines import open_engine
from headwater.engines.transformers import TransformersEngine
from headwater.policies.window import Window

TEXT = Path(__file__).parent / "data" / "voyage_of_the_beagle.txt"


def perplexities(engine: Any, text: Sequence[int], budget: int, tokens: int) -> dict[str, Any]:
    """Perplexity of the text's tokens after the first `budget + 1`, every one of them with a full window."""
    window = Window.of(budget, 4)
    scored: dict[str, list[float]] = {}
    for name, kv_dtype in (("unquantised", None), ("int8", "int8")):
        stream = TransformersEngine(engine.model, engine.tokenizer, name=name, kv_dtype=kv_dtype).open(window)
        stream.feed(text[: budget + 1])
        scored[name] = stream.score(text[budget + 1 : budget + 1 + tokens]).tolist()
    perplexity = {name: math.exp(-statistics.fmean(values)) for name, values in scored.items()}
    moved = [abs(a - b) for a, b in zip(*scored.values(), strict=True)]
    return {
        f"perplexity_{budget}": perplexity,
        f"perplexity_over_unquantised_{budget}": perplexity["int8"] / perplexity["unquantised"],
        f"log_probability_moves_by_{budget}": statistics.fmean(moved),
        f"perplexity_tokens_{budget}": tokens,
    }


def decoding(model: Any, text: Sequence[int], budget: int, steps: int) -> dict[str, Any]:
    """Bytes, and seconds of a step with a full window: in the frame that keys were quantised in, and after it moved."""
    caches = {
        name: WindowCache(model, budget, kv_dtype=kind) for name, kind in (("unquantised", None), ("int8", "int8"))
    }
    ids = torch.tensor([list(text)])
    out: dict[str, Any] = {}
    with torch.inference_mode():
        for cache in caches.values():
            cache.stepwise = True
            while cache.seen < 2 * budget:
                count = cache.exact_chunk(min(256, 2 * budget - cache.seen))
                model(input_ids=ids[:, cache.seen : cache.seen + count], cache=cache, logits_to_keep=1)
        nbytes = {name: cache.nbytes for name, cache in caches.items()}
        out |= {f"bytes_{budget}": nbytes, f"bytes_over_unquantised_{budget}": nbytes["int8"] / nbytes["unquantised"]}
        for state in ("", "_turning"):
            if state:
                for cache in caches.values():
                    cache.skip(1)
            seconds: dict[str, list[float]] = {name: [] for name in caches}
            for step in range(steps):
                new = ids[:, 2 * budget + step : 2 * budget + step + 1]
                for name, cache in caches.items():
                    seconds[name].append(timed(partial(model, input_ids=new, cache=cache, logits_to_keep=1)))
            median = {name: statistics.median(values) for name, values in seconds.items()}
            out[f"step_seconds{state}_{budget}"] = median
            out[f"step_over_unquantised{state}_{budget}"] = median["int8"] / median["unquantised"]
    return out


def main() -> None:
    """Measure, print it as it comes, and store it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("docs/results/int8.json"))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=2048, help="how many are scored")
    parser.add_argument("--steps", type=int, default=60, help="decode steps that are timed")
    options = parser.parse_args()
    torch.manual_seed(0)
    started = now()
    print(f"{hardware()}\nseed 0, {torch.get_num_threads()} threads")
    engine: Any = open_engine(options.model)
    text = engine.encode(options.text.read_text(encoding="utf-8")[: 8 * (4 * options.budget + options.tokens)])
    figures: dict[str, Any] = {}
    take(figures, decoding(engine.model, text, options.budget, options.steps))
    take(figures, decoding(engine.model, text, 4 * options.budget, options.steps))
    take(figures, perplexities(engine, text, options.budget, options.tokens))
    report = {
        "started": started,
        "finished": now(),
        "hardware": hardware(),
        "versions": versions(),
        "seed": 0,
        "threads": torch.get_num_threads(),
        "model": options.model,
        "text": options.text.name,
        "bytes_say": "QuantisedRing says the formula; what is quantised takes (64 + 4) / (64 x 4) = 0.266 of float32",
        "turning_says": "right after the frame of positions moved: for a window long, quantised keys are turned",
        **figures,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({name: value for name, value in report.items() if isinstance(value, float)}))


if __name__ == "__main__":
    main()
