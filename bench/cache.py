"""Speed, memory and exactness of the cache, as ratios measured in one run: `python -m bench.cache`.

Rivals alternate step by step in one process, figures are medians (or means over whole block cycles where a step's cost
has a cycle), and the bound stands beside the measurement. The result goes to `docs/results/cache.json`, and its figures
are the last line printed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import DynamicCache

from bench.clock import take, timed
from bench.rivals import ConcatAndSlice, RotateAll
from headwater.bench.conversation import load
from headwater.bench.machine import hardware, now, versions
from headwater.cache.adapter import WindowCache
from headwater.cache.bank import Shape
from headwater.cache.hosted import examine
from headwater.cache.ring import Ring
from headwater.engines import open_engine
from headwater.policies.window import Window
from headwater.rotary import Rotation
from tests.reference.raw_keys import RawKeys, turn

LAYERS, HEADS, DIM = 30, 3, 64
ROTATION = Rotation(frequencies=tuple((100_000.0 ** (-torch.arange(0, DIM, 2).float() / DIM)).tolist()))
FRAME = 8192


class RingStep:
    """The ring's whole step as the adapter drives it: begin, every layer, commit, and a rebase now and then."""

    def __init__(
        self, budget: int, pins: int = 4, block: int | None = None, dtype: torch.dtype = torch.float32
    ) -> None:
        shape = Shape(
            kv_heads=HEADS, key_dim=DIM, value_dim=DIM, dtype=dtype, device=torch.device("cpu"), rotation=ROTATION
        )
        self.window = Window.of(budget, pins, block)
        self.ring = Ring(self.window, [shape] * LAYERS)
        self.frame = max(FRAME, 2 * budget + self.window.block + 1)

    def step(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        if self.ring.next_position + 1 > self.frame:
            self.ring.rebase()
        self.ring.begin(1, 1)
        for layer in range(LAYERS):
            self.ring.update(layer, keys, values)
        self.ring.commit()

    def fill(self) -> None:
        count = self.ring.ledger.room
        keys = torch.randn(1, HEADS, count, DIM).to(self.ring.shapes[0].dtype)
        self.ring.begin(count, 1)
        for layer in range(LAYERS):
            self.ring.update(layer, keys, keys)
        self.ring.commit()


def update_costs(steps: int) -> dict[str, Any]:
    """Seconds of one step's cache update, rivals in turn; means over whole cycles of the largest block."""
    token = torch.randn(1, HEADS, 1, DIM)
    rings = {f"ring {budget}": RingStep(budget) for budget in (512, 2048, 8192)}
    rings["ring 2048, block 1"] = RingStep(2048, block=1)
    rivals: dict[str, Any] = dict(rings)
    for ring in rings.values():
        ring.fill()
    rivals["concatenate and slice 2048"] = ConcatAndSlice(LAYERS, (1, HEADS, DIM), 4, 2044)
    rivals["rotate all 2048"] = RotateAll(LAYERS, (1, HEADS, DIM), 4, 2044)
    seconds: dict[str, list[float]] = {name: [] for name in rivals}
    for step in range(steps):
        for name, rival in rivals.items():
            if name.startswith("ring") or step % 16 == 0:  # the slow rivals' steps are all alike
                seconds[name].append(timed(lambda rival=rival: rival.step(token, token)))
    mean = {name: statistics.fmean(values) for name, values in seconds.items()}
    return {
        "update_8192_over_512": mean["ring 8192"] / mean["ring 512"],
        "rotate_all_over_ours_2048": mean["rotate all 2048"] / mean["ring 2048"],
        "concat_over_ours_2048": mean["concatenate and slice 2048"] / mean["ring 2048"],
        "update_seconds": {
            name: {"mean": mean[name], "median": statistics.median(values), "worst": max(values), "steps": len(values)}
            for name, values in seconds.items()
        },
        "update_bound_bytes": 4 * LAYERS * HEADS * DIM * 4,
    }


def decode_rates(engine: Any, text: list[int], steps: int) -> dict[str, Any]:
    """Decoding at a held length: the ring in steady state against the stock cache holding as many, in turn."""
    model, out = engine.model, {}
    for budget in (512, 2048):
        ours = WindowCache(model, budget)
        stock = DynamicCache(config=model.config)
        rates: dict[str, list[float]] = {"ours": [], "stock": []}
        with torch.inference_mode():
            ids = torch.tensor([text])
            ours.stepwise = True
            fed = 0
            while fed < budget + 1:
                count = ours.exact_chunk(min(512, budget + 1 - fed))
                model(input_ids=ids[:, fed : fed + count], cache=ours, logits_to_keep=1)
                fed += count
            model(input_ids=ids[:, :budget], cache=stock, logits_to_keep=1)
            for step in range(steps):
                new = ids[:, fed + step : fed + step + 1]
                for name, cache in (("ours", ours), ("stock", stock)):
                    step_of = partial(model, input_ids=new, cache=cache, logits_to_keep=1)
                    rates[name].append(timed(step_of))
                stock.crop(-1)
        seconds = {name: statistics.median(values) for name, values in rates.items()}
        out[f"decode_over_dynamic_{budget}"] = seconds["stock"] / seconds["ours"]
        out[f"tokens_per_s_{budget}"] = {name: 1 / value for name, value in seconds.items()}
        out[f"held_during_decode_{budget}"] = [budget - ours.window.block + 1, budget]
    return out


def decode_far(engine: Any, text: list[int], steps: int) -> dict[str, Any]:
    """Decoding at 20,000 tokens seen against 2,000, two streams in turn; and the resident memory in between."""
    window = Window.of(512, 4)
    near, far = engine.open(window), engine.open(window)
    near.feed(text[:2000])
    far.feed(text[:2000])
    process = psutil.Process()
    for token in text[2000:2064]:
        far.feed([token])
    resident = [process.memory_info().rss]
    for start in range(2064, 22_064, 16):
        far.feed([text[index % len(text)] for index in range(start, start + 16)])
        if (start - 2064) % 2000 == 0:
            resident.append(process.memory_info().rss)
    resident.append(process.memory_info().rss)
    seconds: dict[str, list[float]] = {"near": [], "far": []}
    for step in range(steps):
        for name, stream in (("near", near), ("far", far)):
            seconds[name].append(timed(lambda stream=stream, step=step: stream.feed([text[step]])))
    median = {name: statistics.median(values) for name, values in seconds.items()}
    layers = LAYERS * 2 * HEADS * DIM * 4
    return {
        "decode_20000_over_2000": median["near"] / median["far"],
        "seen_far": far.seen,
        "rss_growth_mb": (resident[-1] - resident[0]) / 1e6,
        "rss_bytes": resident,
        "cache_bytes": far.nbytes,
        "cache_bytes_formula": layers * (512 + 1) + LAYERS * HEADS * DIM * 4 * 4,
        "cache_bytes_formula_says": "layers x 2 x kv_heads x head_dim x 4 x (budget + 1), and float32 keys of the pins",
    }


def exactness(engine: Any, text: list[int], length: int) -> dict[str, Any]:
    """Largest difference of a logit between the ring and its slow twin, token by token in float32."""
    model = engine.model
    cache = WindowCache(model, 256, block=1)
    shapes = examine(model).shapes
    twin = RawKeys([shape for shape in shapes if shape is not None], [None] * len(shapes), cache.window)
    ids = torch.tensor([text[:length]])
    largest = scale = 0.0
    zero = torch.zeros(1, 1, dtype=torch.long)
    with torch.inference_mode():
        for index in range(length):
            new = ids[:, index : index + 1]
            ours = model(input_ids=new, cache=cache).logits
            for layer in twin.raw:
                layer.forget()
            theirs = model(input_ids=new, position_ids=zero, cache=twin).logits
            largest = max(largest, (ours - theirs).abs().max().item())
            scale = max(scale, theirs.abs().max().item())
    return {
        "logit_difference_max": largest,
        "logit_difference_tokens": length,
        "logit_scale": scale,
        "logit_difference_evictions": int(cache.ring.ledger.gone),
    }


def pin_error(evictions: int) -> dict[str, Any]:
    """Relative error of the pins' keys in bfloat16 after many evictions, and that of one rotation, for comparison."""
    ring = RingStep(64, block=1, dtype=torch.bfloat16)
    ring.fill()
    token = torch.randn(1, HEADS, 1, DIM).to(torch.bfloat16)
    for _ in range(evictions):
        ring.step(token, token)
    bank = next(iter(ring.ring.banks.values()))
    shift = ring.ring.ledger.gone - ring.ring.base
    exact = torch.stack([turn(layer.double(), [shift] * 4, ROTATION) for layer in bank.pristine])

    def error(keys: torch.Tensor) -> float:
        return ((keys.double() - exact).norm() / exact.norm()).item()

    return {
        "pin_error_bf16": error(bank.keys[..., :4, :]),
        "pin_error_bf16_one_rotation": error(exact.to(torch.bfloat16)),
        "pin_evictions": ring.ring.ledger.gone,
        "pin_shift": shift,
    }


def help_seconds() -> float:
    """Seconds that `headwater --help` takes, the median of seven processes."""
    command = [sys.executable, "-c", "from headwater.cli import main; main()", "--help"]
    if b"Usage: " not in subprocess.run(command, check=True, capture_output=True).stdout:
        raise RuntimeError("headwater --help printed no help")
    return statistics.median(timed(lambda: subprocess.run(command, check=True, capture_output=True)) for _ in range(7))


def bandwidth() -> float:
    """Bytes a second that a copy of a large tensor moves (read and written): the bound of decoding is read once."""
    source = torch.ones(64_000_000)
    target = torch.empty_like(source)
    return 2 * source.nbytes / statistics.median(timed(lambda: target.copy_(source)) for _ in range(5))


def main() -> None:
    """Measure everything, print it as it comes, and store it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("docs/results/cache.json"))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--quick", action="store_true", help="a tenth of the steps; for trying the script out")
    options = parser.parse_args()
    share = 10 if options.quick else 1
    torch.manual_seed(0)
    started = now()
    speed = bandwidth()
    print(f"{hardware()}\nseed 0, {torch.get_num_threads()} threads, a copy moves {speed / 1e9:.1f} GB/s")
    figures: dict[str, Any] = {}
    take(figures, update_costs(2048 // share))
    take(figures, pin_error(10_000 // share))
    figures["help_seconds"] = help_seconds()
    engine: Any = open_engine(options.model)
    weights = sum(p.nbytes for p in engine.model.parameters())
    text = engine.encode(" ".join(f"{pair.question} {pair.answer}" for pair in load(None).exchanges))
    text = (text * (24_000 // len(text) + 1))[:24_000]
    take(figures, decode_rates(engine, text, 60 // share))
    take(figures, exactness(engine, text, 2000 // share))
    take(figures, decode_far(engine, text, 60 // share))
    report = {
        "started": started,
        "finished": now(),
        "hardware": hardware(),
        "versions": versions(),
        "seed": 0,
        "threads": torch.get_num_threads(),
        "model": options.model,
        "copy_bytes_per_s": speed,
        "decode_bound_tokens_per_s": speed / weights,
        "decode_bound_says": "every weight is read once a token, at the speed of a copy",
        **figures,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({name: value for name, value in report.items() if isinstance(value, float)}))


if __name__ == "__main__":
    main()
