"""The README's pictures and table, from the results of `make demo` and of `headwater replay`: `python -m bench.readme`.

Keeps the results in `docs/results/compare.json` and `docs/results/replay_canonical.json`, draws `docs/compare.png` and
`docs/replay.png`, and writes the block between the comparison markers of the README. `tests/test_readme.py` holds the
README to the stored results. What is shown of the replay is
`headwater replay --policies all,random,oracle --budgets 128,256,512,1024`.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from headwater.bench import replay_plots, replay_results, report
from headwater.bench.results import Results, read
from headwater.bench.table import COLUMNS, cells

ROOT = Path(__file__).parents[1]
STORED = ROOT / "docs" / "results" / "compare.json"
REPLAYED = ROOT / "docs" / "results" / "replay_canonical.json"
START, END = "<!-- comparison -->", "<!-- /comparison -->"


def block(results: Results) -> str:
    """What the README says of a comparison."""
    hardware, source = results.hardware, results.conversation
    lead = (
        f"{results.model} through a real conversation of {source.turns} turns ({source.tokens:,} tokens) in a budget "
        f"of {results.settings.budget_tokens} tokens, on {hardware['cores']} cores of an {hardware['cpu']}, float32; "
        f"measured by `make demo`:"
    )
    lines = [list(COLUMNS), ["---"] * len(COLUMNS), *cells(results)]
    return "\n".join([lead, "", *(f"| {' | '.join(line)} |" for line in lines)])


def with_block(text: str, new: str) -> str:
    """The README with another block between the markers."""
    before, _, rest = text.partition(START)
    return f"{before}{START}\n{new}\n{END}{rest.partition(END)[2]}"


def main() -> None:
    """Keep the results, draw the pictures, write the block."""
    shutil.copyfile(ROOT / "report" / "results.json", STORED)
    shutil.copyfile(ROOT / "report" / "replay" / "results.json", REPLAYED)
    replay_plots.summary(replay_results.read(REPLAYED), ROOT / "docs" / "replay.png")
    results = read(STORED)
    report.summary(results, ROOT / "docs" / "compare.png")
    readme = ROOT / "README.md"
    readme.write_text(with_block(readme.read_text(encoding="utf-8"), block(results)), encoding="utf-8")


if __name__ == "__main__":
    main()
