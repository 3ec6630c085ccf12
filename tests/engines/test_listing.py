"""What engines there are, and how one is named with its options."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import pytest

from headwater.engines import ENGINES, listing, open_engine, split_engine
from headwater.engines.listing import ABOUT, listed
from headwater.errors import UnknownName, UsageError


def test_every_engine_is_listed_with_what_is_installed_of_it():
    rows = listed()
    assert [row.name for row in rows] == list(ENGINES) == list(ABOUT)
    assert next(row for row in rows if row.name == "fake").found == "built in"
    found = next(row for row in rows if row.name == "transformers").found
    assert found is None or found.startswith("transformers 5.")


def test_an_engine_of_which_a_part_is_missing_is_not_installed(monkeypatch: pytest.MonkeyPatch):
    def without(package: str) -> str:
        if package in ("accelerate", "xllamacpp", "mlx-lm"):
            raise PackageNotFoundError(package)
        return "1.0"

    monkeypatch.setattr(listing, "version", without)
    monkeypatch.setattr(listing.llamacpp_library, "installed", lambda: None)
    assert {row.name: (row.found, row.install) for row in listed()} == {
        "transformers": (None, "pip install 'headwater[transformers]'"),
        "llamacpp": (None, "pip install 'headwater[llamacpp]'"),
        "mlx": (None, "pip install 'headwater[mlx]'"),
        "fake": ("built in", ""),
    }
    monkeypatch.setattr(listing.llamacpp_library, "installed", lambda: "/opt/libllama.so")
    assert next(row for row in listed() if row.name == "llamacpp").found == "xllamacpp /opt/libllama.so"


@pytest.mark.parametrize(
    ("given", "name", "options"),
    [
        ("fake", "fake", {}),
        ("fake:", "fake", {}),
        ("llamacpp:n_gpu_layers=-1,type_k=q8_0", "llamacpp", {"n_gpu_layers": -1, "type_k": "q8_0"}),
        ("transformers: dtype = bfloat16", "transformers", {"dtype": "bfloat16"}),
    ],
)
def test_an_engine_is_named_with_its_options(given: str, name: str, options: dict[str, object]):
    assert split_engine(given) == (name, options)


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ("onnx", UnknownName, r"unknown engine 'onnx'; known: .*also accepted: NAME:OPTION=VALUE"),
        ("fake:answer_tokens", UsageError, r"'answer_tokens' in .* is not one OPTION=VALUE"),
        ("fake:answer_tokens=", UsageError, "is not one OPTION=VALUE"),
        ("fake:answer_tokens=1,,", UsageError, "is not one OPTION=VALUE"),
        ("fake:answer_tokens=1,answer_tokens=2", UsageError, "'answer_tokens=2' in"),
    ],
)
def test_what_is_not_of_that_form_is_refused(given: str, error: type[UsageError], words: str):
    with pytest.raises(error, match=words):
        split_engine(given)


def test_options_reach_the_engine_and_unknown_ones_do_not():
    assert open_engine("x", engine="fake:context_length=77").context_length == 77
    assert open_engine("x", engine="fake", context_length=78).context_length == 78
    with pytest.raises(UsageError, match=r"option 'context_length' was given in .* and beside it"):
        open_engine("x", engine="fake:context_length=77", context_length=77)
    with pytest.raises(UsageError, match="has no option 'lenght'"):
        open_engine("x", engine="fake:lenght=77")
    with pytest.raises(
        UnknownName, match="unknown option of the engine transformers 'n_threads'; known: device, dtype"
    ):
        open_engine("smollm2", engine="transformers:n_threads=2")
