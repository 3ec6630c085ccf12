"""Walls that import-linter cannot see: below external packages, and behind lazy imports."""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.base_install import EXTRAS

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "src" / "headwater"
ADAPTER = SOURCES / "cache" / "hosted.py"

BLOCKER = f"""
import runpy, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {EXTRAS}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocker())
"""


def cache_classes(source: str) -> Iterator[str]:
    """What a module takes from `transformers.cache_utils`, by whatever way of importing it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("transformers.cache_utils"))
        elif isinstance(node, ast.ImportFrom) and node.module == "transformers.cache_utils":
            yield node.module
        elif isinstance(node, ast.ImportFrom) and node.module == "transformers":
            yield from (name.name for name in node.names if name.name == "cache_utils" or name.name.endswith("Cache"))


@pytest.mark.parametrize(
    "source",
    [
        "import transformers.cache_utils",
        "import transformers.cache_utils as cu",
        "def f():\n    from transformers.cache_utils import Cache",
        "from transformers import cache_utils",
        "from transformers import AutoTokenizer, DynamicCache",
    ],
)
def test_every_way_of_importing_it_is_seen(source: str) -> None:
    assert list(cache_classes(source))


def test_the_cache_api_of_transformers_is_imported_in_one_file() -> None:
    """It changes with every minor release."""
    users = [path for path in SOURCES.rglob("*.py") if list(cache_classes(path.read_text(encoding="utf-8")))]
    assert users == [ADAPTER]


def run_isolated(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, timeout=120, check=False)


def test_a_base_install_works() -> None:
    done = run_isolated(f"{BLOCKER}\nrunpy.run_path({str(ROOT / 'tests' / 'base_install.py')!r}, run_name='__main__')")
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "a base install works\n")


def test_the_blocker_blocks() -> None:
    done = run_isolated(f"{BLOCKER}\nimport torch")
    assert "No module named 'torch'" in done.stderr


def test_importing_headwater_and_its_command_line_loads_nothing_heavy() -> None:
    code = """
        import sys
        import headwater, headwater.cli
        heavy = {"torch", "transformers", "matplotlib", "rich", "numpy", "safetensors"} & set(sys.modules)
        assert not heavy, heavy
    """
    done = run_isolated(textwrap.dedent(code))
    assert (done.returncode, done.stderr) == (0, "")
