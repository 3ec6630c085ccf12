"""What recording costs over the plain forward pass, in time, disk and memory: `python -m bench.recording`.

`measure()` alternates the plain pass and the recording of every head in one process, each round on a new folder, and
takes medians. The plain pass is the faster of one call over all tokens and the chunks that a stream feeds. Memory is
measured in a process of its own for each length, from the moment the model is loaded.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from bench.clock import peak_bytes, take, timed
from headwater.bench.machine import hardware, now, versions
from headwater.bench.recording import MEMORY_BYTES, Text, read_text, record
from headwater.cache.hosted import stock_cache
from headwater.engines import open_engine

TEXT = Path(__file__).parent / "data" / "voyage_of_the_beagle.txt"
TOKENS = 2048
LENGTHS = (1024, 2048)


def measure(*, model: str = "smollm2", tokens: int = TOKENS, rounds: int = 5) -> dict[str, Any]:
    """Every figure of this file, over the beginning of the book."""
    engine: Any = open_engine(model)
    text = read_text(engine, TEXT)
    figures = {**cost(engine, text, tokens, rounds), **growth(model)}
    engine.close()
    return figures


def cost(engine: Any, text: Text, tokens: int, rounds: int) -> dict[str, Any]:
    """Seconds of the plain pass and of the recording, bytes written, and the bound."""
    ids = torch.tensor([text.tokens[:tokens]])

    def at_once() -> None:
        with torch.inference_mode():
            engine.model(input_ids=ids, cache=stock_cache(engine.model), use_cache=True, logits_to_keep=1)

    def in_chunks() -> None:
        stream = engine.open(None)
        stream.feed(text.tokens[:tokens])
        stream.close()

    seconds: dict[str, list[float]] = {"at once": [], "in chunks": [], "recording": [], "until the disk has it": []}
    stored = 0
    engine.attention_heads()  # the proof that it can be watched is made once for a model, not once for a recording
    at_once()
    for _ in range(rounds):
        seconds["at once"].append(timed(at_once))
        seconds["in chunks"].append(timed(in_chunks))
        os.sync()
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / "trace"
            seconds["recording"].append(timed(lambda trace=trace: record(engine, text, trace, tokens=tokens)))
            seconds["until the disk has it"].append(timed(os.sync))
            stored = sum(file.stat().st_size for file in trace.rglob("*") if file.is_file())
    median = {name: statistics.median(values) for name, values in seconds.items()}
    forward = min(median["at once"], median["in chunks"])
    layers, heads = engine.attention_heads()
    weights = layers * heads * tokens * (tokens + 1) // 2
    moved = weights * (3 * 4 + 4 + 2 + 2) + 2 * stored
    return {
        "record_over_forward": median["recording"] / forward,
        "record_seconds": median,
        "record_seconds_of_runs": seconds,
        "record_tokens": tokens,
        "record_rows": layers * heads,
        "record_memory_bytes": MEMORY_BYTES,
        "record_stored_bytes": stored,
        "record_weight_bytes": 2 * weights,
        "record_compression": 2 * weights / stored,
        "record_bound_over_forward": 1 + moved / _copy_bytes_per_s() / forward,
        "record_bound_bytes": moved,
        "record_bound_says": "the forward pass, and every weight of the lower triangle moved at the speed of a copy: "
        "written as float32, read for the output, read and written as float16, read to be compressed; and what was "
        "compressed, written and read once",
    }


def growth(model: str) -> dict[str, Any]:
    """The most resident memory that a recording of each length took above the loaded model."""
    peaks = {
        length: json.loads(
            subprocess.run(
                [sys.executable, "-m", "bench.recording", "--model", model, "--grow", str(length)],
                check=True,
                capture_output=True,
                text=True,
                cwd=Path(__file__).parents[1],
            ).stdout
        )
        for length in LENGTHS
    }
    short, long = LENGTHS
    return {
        "record_peak_bytes": {str(length): peak for length, peak in peaks.items()},
        "record_peak_growth": peaks[long] / peaks[short],
        "record_peak_says": f"resident bytes above the loaded model, of a stated {MEMORY_BYTES}; from {short} to "
        f"{long} tokens the weights grow by {(long / short) ** 2:g}",
    }


def grow(model: str, tokens: int) -> int:
    """The peak of this process while it records so many tokens, above what it takes with the model loaded and warm."""
    engine: Any = open_engine(model)
    text = read_text(engine, TEXT)
    with tempfile.TemporaryDirectory() as folder:
        record(engine, text, Path(folder) / "first", tokens=16)
        return peak_bytes(lambda: record(engine, text, Path(folder) / "trace", tokens=tokens))


def _copy_bytes_per_s() -> float:
    """Bytes that a copy of a large tensor reads and writes in a second."""
    source = torch.ones(64_000_000)
    target = torch.empty_like(source)
    return 2 * source.nbytes / statistics.median(timed(lambda: target.copy_(source)) for _ in range(5))


def main() -> None:
    """Measure, and print the figures; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--grow", type=int, metavar="TOKENS", help="only the peak of memory, in this process")
    options = parser.parse_args()
    if options.grow:
        print(json.dumps(grow(options.model, options.grow)))
        return
    print(f"{now()} {hardware()}\n{versions()}, {torch.get_num_threads()} threads")
    figures: dict[str, Any] = {}
    take(figures, measure(model=options.model, tokens=options.tokens, rounds=options.rounds))
    print(json.dumps({name: value for name, value in figures.items() if isinstance(value, int | float)}))


if __name__ == "__main__":
    main()
