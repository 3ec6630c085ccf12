"""Recording over a text: what is asked for is what is stored, in a stated memory, and what cannot be is refused."""

from __future__ import annotations

import tracemalloc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headwater.bench import recording
from headwater.bench.recording import Text, info, read_text, record, run, show
from headwater.engines.base import Engine
from headwater.engines.fake import FakeEngine
from headwater.errors import InputFileError, UnsupportedCall, UsageError
from headwater.traces import Head
from headwater.traces.store import RecordedTrace

STORY = "It was a dark and stormy night; the rain fell in torrents. "


class Watched:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.parts, self.steps = list[tuple[str, int]](), list[int]()

    def start(self, name: str, total: int) -> None:
        self.parts.append((name, total))

    def advance(self, steps: int = 1) -> None:
        self.steps.append(steps)


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine(context_length=1000)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "story.txt"
    path.write_text(STORY * 10)
    return path


def text(tokens: int, name: str = "a text") -> Text:
    return Text(name=name, sha256="0" * 64, tokens=tuple((index * index) % 251 for index in range(tokens)))


def paid(engine: Engine, tokens: tuple[int, ...], **options: Any) -> np.ndarray:
    """What the engine says, as a trace has it: `[rows, steps, positions]`."""
    (block,) = engine.attention(tokens, block=len(tokens), **options)
    return block.weights.reshape(-1, len(tokens), len(tokens))[:, 1:].astype(np.float32)


# What is stored.


def test_the_trace_is_the_attention_of_the_engine(engine: FakeEngine, tmp_path: Path):
    trace = record(engine, text(300), tmp_path / "trace", dtype="float32")
    np.testing.assert_array_equal(trace.whole(), paid(engine, text(300).tokens))
    assert trace.heads == tuple(Head(layer=layer, head=head) for layer in range(4) for head in range(3))
    half = record(engine, text(300), tmp_path / "half")
    np.testing.assert_array_equal(half.whole(), paid(engine, text(300).tokens, dtype=np.float16))


def test_a_part_is_recorded_whatever_the_order_it_is_named_in(engine: FakeEngine, tmp_path: Path):
    trace = record(engine, text(90), tmp_path / "trace", layers=[3, 1], heads=[2], tokens=70, dtype="float32")
    assert trace.heads == (Head(layer=1, head=2), Head(layer=3, head=2))
    np.testing.assert_array_equal(trace.whole(), paid(engine, text(90).tokens[:70], layers=[1, 3], heads=[2]))


def test_the_facts_say_what_was_recorded(engine: FakeEngine, file: Path, tmp_path: Path):
    facts = record(engine, read_text(engine, file), tmp_path / "trace", tokens=100).facts
    assert (facts.model, facts.architecture, facts.trained_length) == ("fake", "FakeEngine", 1000)
    assert facts.text_name == "story.txt"
    assert facts.tokens == tuple(engine.encode(STORY * 10)[:100])
    assert facts.tokenizer_sha256 == engine.facts().tokenizer_sha256


def test_without_a_number_as_much_is_recorded_as_there_is_and_it_is_said(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    said = list[str]()
    assert record(engine, text(120), tmp_path / "short", tell=said.append).tokens == 120
    assert "Choice: the first 120 of 120 tokens, because no number was given" in said[0]
    assert record(engine, text(1200), tmp_path / "context", layers=[0], heads=[0]).tokens == 1000
    monkeypatch.setattr(recording, "TOKENS", 77)
    assert record(engine, text(120), tmp_path / "most").tokens == 77


def test_the_header_says_what_it_will_take(engine: FakeEngine, tmp_path: Path):
    said = list[str]()
    record(engine, text(300), tmp_path / "trace", tokens=200, layers=[0, 2, 3], tell=said.append)
    lines = said[0].splitlines()
    assert lines[0] == "Model:  fake (FakeEngine, integer), trained length 1,000 tokens"
    assert lines[1] == "Text:   a text, 200 tokens"
    assert lines[2] == "Rows:   3 layers (0, 2-3), 3 heads (0-2), as float16"
    assert "of 488.3 MiB beside the model, 128 tokens at a time" in lines[3]
    assert lines[4].startswith(f"Disk:   at most {recording.size(9 * 200 * 201 // 2 * 2)} in ")
    assert len(lines) == 5


# Going on.


class Stopping(FakeEngine):
    """A fake engine that is interrupted after so many blocks."""

    def __init__(self, blocks: int) -> None:
        super().__init__(context_length=1000)
        self.blocks = blocks

    def attention(self, *arguments: Any, **options: Any):
        def run():
            for count, block in enumerate(blocks):
                if count == self.blocks:
                    raise KeyboardInterrupt
                yield block

        blocks = super().attention(*arguments, **options)
        return run()


def test_an_interrupted_recording_goes_on_and_says_so(engine: FakeEngine, tmp_path: Path):
    whole = record(engine, text(600), tmp_path / "whole").whole()
    bars, said = Watched(), list[str]()
    with pytest.raises(KeyboardInterrupt):
        record(Stopping(2), text(600), tmp_path / "trace", bars=bars)
    assert (bars.parts, bars.steps) == ([("recording", 600)], [0, 128, 128])
    assert RecordedTrace(tmp_path / "trace").tokens == 256
    bars = Watched()
    trace = record(engine, text(600), tmp_path / "trace", bars=bars, tell=said.append)
    assert bars.steps == [256, 128, 128, 88]
    assert "256 of 600 tokens are there already; the recording goes on after them" in said[0]
    np.testing.assert_array_equal(trace.whole(), whole)


def test_a_complete_recording_is_left_as_it_is(engine: FakeEngine, tmp_path: Path):
    record(engine, text(100), tmp_path / "trace")
    assert record(Stopping(0), text(100), tmp_path / "trace").complete


def test_another_text_is_not_recorded_over_the_first(engine: FakeEngine, tmp_path: Path):
    record(engine, text(100), tmp_path / "trace")
    with pytest.raises(UsageError, match="another recording: text_name is 'a text' there and 'other' now"):
        record(engine, text(100, "other"), tmp_path / "trace")


# The memory.


def test_a_smaller_memory_makes_smaller_blocks_and_the_same_trace(engine: FakeEngine, tmp_path: Path):
    said = list[str]()
    kwargs: dict[str, Any] = {"tokens": 900, "dtype": "float32", "tell": said.append}
    large = record(engine, text(900), tmp_path / "large", **kwargs)
    small = record(engine, text(900), tmp_path / "small", memory_bytes=72_500_000, **kwargs)
    assert "128 tokens at a time" in said[0]
    assert "64 tokens at a time" in said[1]
    np.testing.assert_array_equal(large.whole(), small.whole())


def test_a_memory_that_holds_nothing_is_refused_with_what_it_takes(engine: FakeEngine, tmp_path: Path):
    with pytest.raises(
        UsageError, match=r"9.5 MiB of memory do not hold 64 tokens .* which take \d\d.\d MiB; give more"
    ):
        record(engine, text(900), tmp_path / "trace", memory_bytes=10_000_000)
    assert list(tmp_path.iterdir()) == []


def peak(engine: Engine, folder: Path, tokens: int, memory_bytes: int) -> int:
    tracemalloc.start()
    record(engine, text(tokens), folder, memory_bytes=memory_bytes)
    top = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return top


def test_the_memory_is_kept_and_does_not_grow_with_the_square(tmp_path: Path):
    engine, memory_bytes = FakeEngine(), 75_000_000
    record(engine, text(100), tmp_path / "first", memory_bytes=memory_bytes)  # imports zarr
    short = peak(engine, tmp_path / "short", 1000, memory_bytes)
    long = peak(engine, tmp_path / "long", 3000, memory_bytes)
    assert long < memory_bytes
    assert long < 3.5 * short


def test_one_block_is_in_memory_at_a_time(tmp_path: Path):
    last = list[weakref.ref[np.ndarray]]()

    class Watching(FakeEngine):
        def attention(self, *arguments: Any, **options: Any):
            blocks = super().attention(*arguments, **options)
            while (block := next(blocks, None)) is not None:
                last.append(weakref.ref(block.weights))
                handed = [block]
                del block
                yield handed.pop()
                assert last[-1]() is None, "the block is still held while the next one is made"

    record(Watching(), text(600), tmp_path / "trace")
    assert len(last) == 5


# Refusals, before anything is written.


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tokens": 301}, "a text has 300 tokens, and 301 were asked for; ask for fewer"),
        ({"tokens": 1}, "tokens must be at least 2, .* got 1"),
        ({"layers": [0, 4]}, "there is no layer 4 to watch; fake shows layers 0-3"),
        ({"heads": [3]}, "there is no head 3 to watch; every layer has heads 0-2"),
        ({"layers": []}, "no layers to watch"),
        ({"layers": [1, 1]}, "layer 1 is named twice"),
        ({"dtype": "int8"}, "dtype must be one of float16, float32, got 'int8'"),
    ],
    ids=str,
)
def test_what_cannot_be_recorded_is_refused_and_no_folder_is_made(
    engine: FakeEngine, tmp_path: Path, options: dict[str, Any], words: str
):
    with pytest.raises(UsageError, match=words):
        record(engine, text(300), tmp_path / "trace", **options)
    assert list(tmp_path.iterdir()) == []


def test_a_text_longer_than_the_context_is_refused_with_both_numbers(engine: FakeEngine, tmp_path: Path):
    with pytest.raises(UsageError, match="1,200 tokens are longer than fake was trained for; ask for at most 1,000"):
        record(engine, text(2000), tmp_path / "trace", tokens=1200)
    assert list(tmp_path.iterdir()) == []


def test_an_engine_that_shows_no_attention_is_refused(tmp_path: Path):
    class Blind(FakeEngine):
        attention_layers = Engine.attention_layers
        attention_heads = Engine.attention_heads

    with pytest.raises(UnsupportedCall, match="does not show its attention"):
        record(Blind(), text(30), tmp_path / "trace")
    assert list(tmp_path.iterdir()) == []


def test_layers_that_pay_no_attention_are_left_out_and_it_is_said(tmp_path: Path):
    class Hybrid(FakeEngine):
        def attention_layers(self) -> tuple[int, ...]:
            return (1, 3)

        def attention_heads(self) -> tuple[int, int]:
            return 2, 3

    said = list[str]()
    trace = record(Hybrid(), text(30), tmp_path / "trace", tokens=30, tell=said.append)
    assert trace.layers == (1, 3)
    assert "Choice: only layers 1, 3 pay softmax attention; the others cannot be recorded" in said[0]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "story.txt cannot be read: No such file"),
        (b"", "is empty"),
        (b"ab\xff", "is not a UTF-8 text: .* byte 2"),
    ],
)
def test_a_file_that_is_no_text_is_refused_by_name(
    engine: FakeEngine, tmp_path: Path, content: bytes | None, words: str
):
    file = tmp_path / "story.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InputFileError, match=words) as refused:
        read_text(engine, file)
    assert str(file) in str(refused.value)


# The door.


def test_run_records_and_prints_what_is_there(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    code = run(model="anything", engine="fake", text=file, output=tmp_path / "trace", tokens=400, layers=(0, 1))
    out, err = capsys.readouterr()
    assert code == 0
    assert "Model:  anything" in err
    assert "recording: 400 of 400" in err
    assert f"Folder:       {tmp_path / 'trace'}\n" in out
    assert "Tokens:       400, complete\n" in out
    assert show(tmp_path / "trace") == 0
    assert capsys.readouterr().out == out


def test_ctrl_c_says_what_is_there_and_the_same_call_ends_it(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    call: dict[str, Any] = {"model": "fake", "text": file, "output": tmp_path / "trace", "tokens": 400}
    monkeypatch.setattr(recording, "open_engine", lambda model, engine: Stopping(1))
    assert run(**call) == 130
    out, err = capsys.readouterr()
    assert out == ""
    assert f"Interrupted; what was recorded is in {tmp_path / 'trace'}, and the same command goes on after it" in err
    assert dict(info(RecordedTrace(tmp_path / "trace")))["Tokens"] == (
        "128, of 400; the command that began it goes on after them"
    )
    monkeypatch.setattr(recording, "open_engine", lambda model, engine: FakeEngine(context_length=1000))
    assert run(**call) == 0


def test_info_gives_every_fact(engine: FakeEngine, file: Path, tmp_path: Path):
    trace = record(engine, read_text(engine, file), tmp_path / "trace", tokens=300, layers=[0, 2])
    rows = dict(info(trace))
    assert rows["Model"] == "fake (FakeEngine, integer)"
    assert rows["Rotary"] == "none"
    assert rows["Layers"] == "2 (0, 2)"
    assert rows["Heads"] == "3 (0-2)"
    assert rows["Trained for"] == "1,000 tokens"
    assert rows["Text"] == f"story.txt, sha256 {trace.facts.text_sha256}"
    assert rows["Weights"].startswith("float16; ")
    assert trace.facts.created in rows["Recorded"]


def test_a_real_model_is_recorded_as_it_is_watched(tmp_path: Path):
    """Through the store and in blocks, the weights are those that the model itself returns."""
    torch = pytest.importorskip("torch")
    from headwater.engines.transformers import TransformersEngine
    from tests import tiny
    from tests.engines.test_attention import NoTokenizer

    opened = TransformersEngine(tiny.build("qwen3"), NoTokenizer(), name="tiny")
    ids = tuple(tiny.tokens(300)[0].tolist())
    trace = record(opened, Text(name="t", sha256="0", tokens=ids), tmp_path / "trace", dtype="float32")
    model = tiny.build("qwen3", attention="eager")
    with torch.inference_mode():
        returned = model(input_ids=torch.tensor([ids]), output_attentions=True, use_cache=False).attentions
    expected = torch.stack(returned)[:, 0].numpy().reshape(-1, 300, 300)[:, 1:]
    np.testing.assert_allclose(trace.whole(), expected, rtol=0, atol=1e-5)
    assert trace.facts.rotary["rope_type"] == "default"
    assert trace.facts.precision == "float32"
