"""Which engine is taken when nobody names one."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.chat.session import Chat
from headwater.engines import default, models
from headwater.engines.default import default_engine
from headwater.errors import MissingExtra
from headwater.policies import policy
from tests import tiny_gguf
from tests.llamacpp import require_llamacpp

WINDOW = policy("streaming-llm", budget=64)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(default.llamacpp_library, "installed", lambda: "some")
    monkeypatch.setattr(default, "find_spec", lambda name: True)
    path = tmp_path / "tiny.bin"
    path.write_bytes(b"GGUF and more")
    return path


def test_a_gguf_file_is_for_llama_cpp_whatever_it_is_called(file: Path):
    assert default_engine(str(file), WINDOW) == "llamacpp"
    file.write_bytes(b"PK")
    assert default_engine(str(file), WINDOW) == "transformers"


def test_other_models_are_for_transformers(file: Path):
    for model in (str(file.parent), "owner/name", str(file.parent / "none.gguf")):
        assert default_engine(model, WINDOW) == "transformers"


@pytest.mark.parametrize("name", ["h2o", "tova", "random"])
def test_policies_that_pick_in_every_head_are_for_transformers(file: Path, name: str):
    assert default_engine(str(file), policy(name, budget=64)) == "transformers"
    assert default_engine(str(file), policy("full", budget=64)) == "llamacpp"


def test_without_llama_cpp_or_its_templates_it_is_transformers(file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(default, "find_spec", lambda name: None)
    assert default_engine(str(file), WINDOW) == "transformers"
    monkeypatch.undo()
    monkeypatch.setattr(default.llamacpp_library, "installed", lambda: None)
    assert default_engine(str(file), WINDOW) == "transformers"


def test_a_known_model_is_for_llama_cpp_unless_only_its_unpacked_weights_are_here(
    file: Path, monkeypatch: pytest.MonkeyPatch
):
    for gguf, folder, engine in ((file, file.parent, "llamacpp"), (None, None, "llamacpp")):
        monkeypatch.setattr(models, "_kept_gguf", lambda known, gguf=gguf: gguf)
        monkeypatch.setattr(models.modelstore, "find", lambda sha256, folder=folder: folder)
        assert default_engine("smollm2", WINDOW) == engine
    monkeypatch.setattr(models.modelstore, "find", lambda sha256: file.parent)
    assert default_engine("smollm2", WINDOW) == "transformers"


def test_a_session_goes_on_under_the_engine_that_it_was_begun_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    require_llamacpp()
    model = tiny_gguf.write(tmp_path / "tiny.gguf", context_length=512)
    given = {"session": tmp_path / "talk.db", "max_tokens": 4, "sampling": {"temperature": 0.0}}
    with Chat.open(str(model), budget=200, **given) as chat:
        assert type(chat.engine).__name__ == "LlamaCppEngine"
        "".join(chat.send("hi"))
    monkeypatch.setattr("headwater.chat.opening.default_engine", lambda *_: pytest.fail("nobody has to choose"))
    with Chat.open(**given) as chat:
        assert type(chat.engine).__name__ == "LlamaCppEngine"
        assert len(chat.messages) == 2


def test_the_file_alone_is_brought_where_nothing_could_unpack_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(models, "require_runtime", lambda: None)
    assert models.can_unpack()

    def missing() -> None:
        raise MissingExtra("torch", "transformers")

    monkeypatch.setattr(models, "require_runtime", missing)
    monkeypatch.setattr(models.llamacpp_library, "installed", lambda: "some")
    assert not models.can_unpack()
    monkeypatch.setattr(models.llamacpp_library, "installed", lambda: None)
    monkeypatch.setattr(models.mlx_library, "missing", lambda: "mlx")
    assert models.can_unpack()  # and the fetch says what is missing
