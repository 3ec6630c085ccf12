"""What every test shares: no network, and property tests that choose the same examples in every run."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from jaxtyping import install_import_hook

# Shapes are checked where tensors live, and only here: a checked call costs fifty times a plain one.
# Left out: what can be made, policies and traces. There a parameter of the wrong type would never reach the refusal.
CACHE = (
    "cache.bank",
    "cache.ring",
    "cache.quantised",
    "cache.quantised_ring",
    "cache.probe",
    "cache.ledger",
    "cache.host",
)
POLICIES = ("policies.base", "policies.signals", "policies.protection", "policies.pooled_history")
TRACES = ("traces.result", "traces.heavy", "traces.window_run")
install_import_hook([f"headwater.{room}" for room in CACHE + POLICIES + TRACES], "beartype.beartype")

os.environ.setdefault("HF_HUB_OFFLINE", "1")

settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=2000)
settings.load_profile("repeatable")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MB, where this process may mount one."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = shutil.which("mount")
    done = mount and subprocess.run([mount, "-t", "tmpfs", "-o", "size=2m", "tmpfs", place], capture_output=True)
    if not done or done.returncode:
        pytest.skip("this process may not mount a file system")
    yield place
    subprocess.run(["umount", place], check=True)
