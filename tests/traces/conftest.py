"""The canonical trace as the slow twin makes it, once for all tests of a process."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.reference.replay_harness import heavy_hitters
from tests.reference.replay_trace import decode_trace


@pytest.fixture(scope="session")
def plain_steps() -> list[NDArray[np.float32]]:
    return list(decode_trace())


@pytest.fixture(scope="session")
def plain_heavy(plain_steps: list[NDArray[np.float32]]) -> list[NDArray[np.int64]]:
    return [heavy_hitters(w) for w in plain_steps]
