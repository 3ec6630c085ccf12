"""What the cache's tests share."""

from __future__ import annotations

from typing import Any

import pytest

from tests import tiny


@pytest.fixture
def model() -> Any:
    return tiny.build("llama")
