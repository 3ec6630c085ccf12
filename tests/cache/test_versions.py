"""Other releases of transformers are refused by number, before an import fails for reasons nobody can read."""

from __future__ import annotations

import subprocess
import sys

import pytest

from headwater.cache.versions import check
from headwater.errors import UnsupportedVersion


@pytest.mark.parametrize("found", ["5.24.0", "5.24.1", "5.30.0.dev0", "5.99"])
def test_releases_in_the_range(found: str) -> None:
    check(found)


@pytest.mark.parametrize("found", ["4.57.6", "5.0.0", "5.23.0", "6.0.0", "6.0.0rc1"])
def test_releases_outside_of_it(found: str) -> None:
    with pytest.raises(
        UnsupportedVersion, match=rf"transformers {found} is installed.*pip install 'transformers>=5.24,<6'"
    ):
        check(found)


def test_the_refusal_comes_before_transformers_is_imported() -> None:
    code = (
        "import importlib.metadata as m, sys; real = m.version\n"
        "m.version = lambda name: '5.10.0' if name == 'transformers' else real(name)\n"
        "import headwater as hw\n"
        "try: hw.WindowCache\n"
        "except hw.HeadwaterError as error: print(error, 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("transformers 5.10.0 is installed")
    assert done.stdout.endswith("False\n")
