"""Where the llama.cpp engine can be tested."""

from __future__ import annotations

import pytest

from headwater.engines import llamacpp_library


def require_llamacpp() -> None:
    """Skip, with the reason, where there is no library to test with."""
    pytest.importorskip("gguf", reason="the test's model is written with gguf; pip install 'headwater[transformers]'")
    if llamacpp_library.installed() is None:
        pytest.skip(f"no llama.cpp is installed; {llamacpp_library.INSTALL}")
