"""What a real model attends to, and how the policies rank on it: `python -m bench.real_attention`.

Records every head of the embedded model over a book, a chat and source code, and replays every policy over each trace
and over the canonical one. The figures go to `docs/results/real_attention.json`; the page `docs/real-attention.md`
takes its tables and pictures from there alone (`bench/real_attention_page.py`). The traces themselves do not stay, but
for small extracts that the tests read (`--extracts FOLDER`).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from bench import real_attention_page
from headwater.bench.conversation import load
from headwater.bench.machine import hardware, now, versions
from headwater.bench.measure import script
from headwater.bench.recording import Text, record
from headwater.engines import open_engine
from headwater.engines.base import Engine
from headwater.policies import policy
from headwater.traces import Trace, replay_all
from headwater.traces.canonical import canonical_trace
from headwater.traces.oracle import oracle
from headwater.traces.store import extract

ROOT = Path(__file__).parents[1]
TOKENS = 2048
SINKS, RECENT = 4, 64
SETTLED = 128
"""The first step that is looked at: before it, the sinks and the most recent positions are nearly all there is."""

POLICIES = ("sliding-window", "streaming-llm", "h2o", "scissorhands", "tova", "snapkv", "random")
"""pyramidkv shares its budget out by layer, so it joins on real traces only; with one layer it is snapkv."""
WITH_SINKS = ("h2o", "scissorhands", "snapkv")
"""Policies replayed a second time with the sinks protected; tova keeps them by itself."""
BUDGETS = (64, 128, 256, 512)
BOUND_BUDGET, BOUND_HEADS = 256, 9
EXTRACT = {"layers": (1, 15), "heads": (0, 4), "tokens": 256}
BOOK = ROOT / "bench" / "data" / "voyage_of_the_beagle.txt"
CODE = ("ring.py", "bank.py", "ledger.py", "probe.py")


def texts(engine: Engine) -> dict[str, Text]:
    """A book, a chat in the model's own template, and Python; each with what it is for a name."""
    chat = script(engine, load(None))
    said = [*chat.head, *(token for each in chat.exchanges for token in (*each.question, *each.answer, *each.close))]
    code = "\n".join((ROOT / "src" / "headwater" / "cache" / name).read_text(encoding="utf-8") for name in CODE)
    book = BOOK.read_text(encoding="utf-8")
    return {
        "book": _text("The Voyage of the Beagle, from its beginning", engine.encode(book)),
        "chat": _text("the bundled conversation, with the model's chat template", said),
        "code": _text(f"{', '.join(CODE)} of this project's cache", engine.encode(code)),
    }


def _text(what: str, tokens: Sequence[int]) -> Text:
    if len(tokens) < TOKENS:
        raise SystemExit(f"{what} has {len(tokens)} tokens, {TOKENS} are needed")
    used = tuple(tokens[:TOKENS])
    return Text(name=what, sha256=sha256(np.asarray(used, dtype="<i8").tobytes()).hexdigest(), tokens=used)


def where(trace: Trace) -> dict[str, list[float]]:
    """Where the mass of each layer goes, mean over its heads and over the steps from `SETTLED` on."""
    totals = {part: np.zeros(trace.rows) for part in ("first", "other_sinks", "recent", "own", "elsewhere")}
    for chunk in trace.chunks():
        for step in chunk.steps:
            if step < SETTLED:
                continue
            weights = chunk.weights[:, step - chunk.first, : step + 1].astype(np.float64)
            totals["first"] += weights[:, 0]
            totals["other_sinks"] += weights[:, 1:SINKS].sum(axis=1)
            totals["recent"] += weights[:, step - RECENT : step].sum(axis=1)
            totals["own"] += weights[:, step]
            totals["elsewhere"] += weights[:, SINKS : step - RECENT].sum(axis=1)
    layers = np.array([head.layer for head in trace.heads])
    steps = trace.tokens - SETTLED
    return {
        part: [round(float(mass[layers == layer].mean()) / steps, 6) for layer in trace.layers]
        for part, mass in totals.items()
    }


Figures = dict[str, dict[str, dict[str, float]]]
"""By policy and budget."""


def replayed(trace: Trace, names: Sequence[str]) -> tuple[Figures, dict[str, float]]:
    """Retained mass and recall of every policy at every budget, in one pass; and how near each comes to the bound.

    The bound is sought on some heads only, at `BOUND_BUDGET`: the second value is the mass on those heads.
    """
    rows = [(name, {}, budget) for name in names for budget in BUDGETS]
    rows += [(name, {"sinks": SINKS}, budget) for name in WITH_SINKS for budget in BUDGETS]
    found: Figures = {}
    sample = range(0, trace.rows, max(1, trace.rows // BOUND_HEADS))
    near: dict[str, float] = {}
    replays = replay_all(trace, [policy(name, budget=budget, **more) for name, more, budget in rows])
    for (name, more, budget), each in zip(rows, replays, strict=True):
        label = f"{name} + {SINKS} sinks" if more else name
        found.setdefault(label, {})[str(budget)] = {
            "retained_attention_mass": each.retained_attention_mass,
            "heavy_hitter_recall": each.heavy_hitter_recall,
        }
        if budget == BOUND_BUDGET:
            near[label] = round(float(each.mass_by_row[sample].mean()), 6)
    near["oracle"] = oracle(trace, BOUND_BUDGET, rows=sample).retained_attention_mass
    return found, near


def main() -> None:
    """Record, replay, write the figures and the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--extracts", type=Path, help="folder for the small extracts of the tests")
    arguments = parser.parse_args()
    engine = open_engine("smollm2")
    canonical, near = replayed(canonical_trace(), POLICIES)
    results: dict[str, Any] = {
        "started": now(),
        "hardware": hardware(),
        "versions": versions(),
        "model": engine.name,
        "tokens": TOKENS,
        "settled": SETTLED,
        "sinks": SINKS,
        "recent": RECENT,
        "budgets": list(BUDGETS),
        "seed": 0,
        "texts": {},
        "where": {},
        "bound_budget": BOUND_BUDGET,
        "replay": {"canonical": canonical},
        "bound": {"canonical": near},
    }
    with tempfile.TemporaryDirectory() as scratch:
        for name, text in texts(engine).items():
            trace = record(engine, text, Path(scratch) / name, tokens=TOKENS)
            results["texts"][name] = {"what": text.name, "sha256_of_tokens": text.sha256}
            results["where"][name] = where(trace)
            results["replay"][name], results["bound"][name] = replayed(trace, (*POLICIES, "pyramidkv"))
            if arguments.extracts:
                extract(trace, arguments.extracts / name, **EXTRACT)
            print(json.dumps({name: results["bound"][name]}), flush=True)
    real_attention_page.STORED.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    real_attention_page.main()


if __name__ == "__main__":
    main()
