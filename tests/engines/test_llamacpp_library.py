"""What is proved of a llama.cpp library before it is trusted, and what is said when it is not."""

from __future__ import annotations

import ctypes.util
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from headwater.chat.session import Chat
from headwater.engines import llamacpp_library as found
from headwater.engines import open_engine
from headwater.engines.fake import FakeEngine
from headwater.errors import MissingExtra, UnsupportedVersion
from tests.llamacpp import require_llamacpp


@pytest.fixture
def opened() -> found.Library:
    require_llamacpp()
    return found.library()


def test_without_the_package_the_command_is_named(monkeypatch: pytest.MonkeyPatch):
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.delenv(found.LIBRARY_VARIABLE, raising=False)
    monkeypatch.setattr(found, "version", missing)
    assert found.installed() is None
    with pytest.raises(MissingExtra, match=r"pip install 'headwater\[llamacpp\]'"):
        open_engine("smollm2", engine="llamacpp")


def test_another_release_of_the_package_is_refused_before_it_is_loaded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(found.LIBRARY_VARIABLE, raising=False)
    monkeypatch.setattr(found, "version", lambda name: "2027.1.20000")
    monkeypatch.setattr(found, "_opened", lambda *given: pytest.fail("it was loaded"))
    with pytest.raises(UnsupportedVersion, match=r"xllamacpp 2027\.1\.20000 is installed, and only 2026\.10\.11549"):
        found.library()


def test_a_library_of_ones_own_is_taken(monkeypatch: pytest.MonkeyPatch, opened: found.Library):
    monkeypatch.setenv(found.LIBRARY_VARIABLE, str(opened.path))
    monkeypatch.setattr(found, "version", lambda name: pytest.fail("the package was looked for"))
    assert found.installed() == str(opened.path)
    assert found.library().path == opened.path


def test_a_library_that_is_not_there_or_is_another_one_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv(found.LIBRARY_VARIABLE, str(tmp_path / "libllama.so"))
    with pytest.raises(UnsupportedVersion, match="cannot be loaded as a library"):
        found.library()
    other = ctypes.util.find_library("m")
    if other is None:
        pytest.skip("no other library to take")
    monkeypatch.setenv(found.LIBRARY_VARIABLE, other)
    with pytest.raises(UnsupportedVersion, match=r"it lacks llama_backend_init, llama_version, .* and more"):
        found.library()


@pytest.mark.parametrize(
    "layouts",
    [
        (found.EarlierContextParams,),  # a field is missing
        (found.ModelParams,),  # of another structure
        (),
    ],
    ids=str,
)
def test_a_structure_that_does_not_fit_is_refused(
    opened: found.Library, monkeypatch: pytest.MonkeyPatch, layouts: tuple[type[ctypes.Structure], ...]
):
    fresh = ctypes.CDLL(str(opened.path))
    name = "llama_context_default_params"
    defaults = {} if layouts == (found.ModelParams,) else found.CONTEXT_DEFAULTS
    with pytest.raises(UnsupportedVersion, match=r"whose llama_context_params Headwater does not know \(\d+ bytes\)"):
        found._layout(fresh, name, layouts, defaults, opened.path, "1.2.3")


def test_a_structure_of_the_right_size_with_fields_elsewhere_is_refused(
    opened: found.Library, monkeypatch: pytest.MonkeyPatch
):
    """Where the extent cannot be measured, the defaults alone tell."""
    monkeypatch.setattr(found.platform, "machine", lambda: "arm64")
    fresh = ctypes.CDLL(str(opened.path))
    given = (fresh, "llama_context_default_params")
    with pytest.raises(UnsupportedVersion, match="does not know; tested is"):
        found._layout(*given, (found.EarlierContextParams,), found.CONTEXT_DEFAULTS, opened.path, "1.2.3")
    fits = found._layout(*given, found.CONTEXT_LAYOUTS, found.CONTEXT_DEFAULTS, opened.path, "1.2.3")
    assert issubclass(fits, found.ContextParams)


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (
            [(4, "llama_model_load: error loading model: unknown model architecture: 'x'\n")],
            "unknown model architecture",
        ),
        ([(2, "gguf_init: loud\n"), (4, "gguf_init: cut short\n"), (4, "llama_model_load: error: no\n")], "cut short"),
        ([(4, "one "), (5, "goes on\n")], "one"),
        ([(2, "nothing bad\n")], "llama.cpp gave no reason"),
    ],
)
def test_the_reason_is_the_first_complaint(lines: list[tuple[int, str]], reason: str):
    log = found.Log()
    for level, text in lines:
        log._take(level, text.encode(), None)
    assert log.reason().startswith(reason)
    log.clear()
    assert log.reason() == "llama.cpp gave no reason"


CRASH = """
import ctypes, sys
from pathlib import Path
from headwater.chat.session import Chat
from headwater.engines.fake import FakeEngine
from headwater.engines.llamacpp_library import library

chat = Chat.open(FakeEngine(), session=Path(sys.argv[1]), budget=200)
"".join(chat.send("what was said before"))
library().call.ggml_abort(b"here.c", ctypes.c_int(7), b"%s", b"no more")
"""


def test_a_crash_inside_llama_cpp_names_its_cause_and_leaves_the_session_whole(opened: found.Library, tmp_path: Path):
    file = tmp_path / "talk.db"
    ended = subprocess.run([sys.executable, "-c", CRASH, str(file)], capture_output=True, text=True)
    assert ended.returncode < 0
    assert "headwater: llama.cpp ends this process: here.c:7: no more" in ended.stderr
    assert "open it again" in ended.stderr
    with Chat.restore(file, FakeEngine()) as chat:
        assert chat.messages[0]["content"] == "what was said before"
        assert len(chat.messages) == 2
