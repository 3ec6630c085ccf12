"""Where the MLX engine can be tested."""

from __future__ import annotations

import pytest

from headwater.engines import mlx_library


def require_mlx() -> None:
    """Skip, with the reason, where MLX is not there."""
    pytest.importorskip("gguf", reason="the test's model is written with gguf; pip install 'headwater[transformers]'")
    if (name := mlx_library.missing()) is not None:
        pytest.skip(f"{name} is not installed; pip install 'headwater[mlx]'")
