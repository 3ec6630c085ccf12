"""The public names, and that importing the package does nothing."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

import headwater as hw
from headwater.errors import BudgetError


def test_exactly_these_names_are_public() -> None:
    assert hw.__all__ == [
        "POLICIES",
        "Chat",
        "FakeEngine",
        "HeadwaterError",
        "Memory",
        "Sampling",
        "Window",
        "WindowCache",
        "__version__",
        "attach",
        "canonical_trace",
        "open_engine",
        "policy",
        "replay",
        "saved_fraction",
        "sliding_window",
    ]
    for name in hw.__all__:
        assert getattr(hw, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = hw.nothing


def test_importing_imports_nothing_heavy() -> None:
    code = "import sys, headwater; print([m for m in ('torch', 'transformers', 'numpy', 'rich') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize("library", ["torch", "numpy"])
@pytest.mark.parametrize(("window", "sinks", "kept"), [(32, 0, 32), (32, 4, 36), (1, 0, 1), (99, 0, 99)])
def test_the_textbook_window(library: str, window: int, sinks: int, kept: int) -> None:
    keys = torch.randn(2, 3, 100, 8)
    values = torch.randn(2, 3, 100, 5)
    if library == "numpy":
        keys, values = keys.numpy(), values.numpy()
    new_keys, new_values = hw.sliding_window(keys, values, window=window, sinks=sinks)
    expected = [*range(sinks), *range(100 - window, 100)]
    assert np.array_equal(new_keys, keys[:, :, expected])
    assert np.array_equal(new_values, values[:, :, expected])
    assert hw.saved_fraction((keys, values), (new_keys, new_values)) == pytest.approx(1 - kept / 100)


def test_the_textbook_window_owns_its_storage() -> None:
    keys, values = torch.randn(1, 3, 100, 8), torch.randn(1, 3, 100, 8)
    new_keys, new_values = hw.sliding_window(keys, values, window=32)
    assert new_keys.shape[2] == 32
    assert f"{hw.saved_fraction(keys, new_keys):.1%}" == "68.0%"
    for new in (new_keys, new_values):
        assert new.untyped_storage().nbytes() == 3 * 32 * 8 * 4
    keys.zero_()
    assert new_keys.abs().sum() > 0


@pytest.mark.parametrize(("window", "sinks"), [(100, 0), (96, 4), (1000, 0)])
def test_the_textbook_window_returns_its_input_when_nothing_goes(window: int, sinks: int) -> None:
    keys, values = torch.randn(1, 3, 100, 8), torch.randn(1, 3, 100, 8)
    new_keys, new_values = hw.sliding_window(keys, values, window=window, sinks=sinks)
    assert new_keys is keys
    assert new_values is values
    assert hw.saved_fraction(keys, new_keys) == 0


def test_the_textbook_window_refuses_by_name() -> None:
    keys = torch.randn(1, 3, 100, 8)
    with pytest.raises(BudgetError, match="window must be at least 1 token, got 0"):
        hw.sliding_window(keys, keys, window=0)
    with pytest.raises(BudgetError, match="sinks must be at least 0, got -1"):
        hw.sliding_window(keys, keys, window=8, sinks=-1)
    with pytest.raises(BudgetError, match="same layer"):
        hw.sliding_window(keys, keys[:, :, :5], window=8)
