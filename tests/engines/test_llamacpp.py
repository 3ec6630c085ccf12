"""The guards of the llama.cpp engine: what it refuses, when it re-indexes, and that seats do not move each other."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headwater.chat.session import Chat
from headwater.engines import open_engine
from headwater.engines.llamacpp import LlamaCppEngine, usable_threads
from headwater.engines.llamacpp_cells import Seat, Settings
from headwater.engines.llamacpp_examined import divergence
from headwater.engines.llamacpp_stream import LlamaCppStream, reindex_step
from headwater.errors import (
    BudgetError,
    CacheStateError,
    HeadwaterError,
    InputFileError,
    ModelFileError,
    SnapshotError,
    UnknownName,
    UnsupportedCall,
    UnsupportedModel,
    UsageError,
)
from headwater.policies import policy
from headwater.policies.window import Window
from tests import tiny_gguf
from tests.llamacpp import require_llamacpp

TEXT = np.random.default_rng(5).integers(0, 256, 1500).tolist()
SHARP = {"type_k": "f32", "type_v": "f32", "flash_attn": "off"}
Build = Callable[..., LlamaCppEngine]


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """Make a model file and open it; the arguments are those of both."""
    require_llamacpp()

    def make(*, options: dict[str, Any] | None = None, **given: Any) -> LlamaCppEngine:
        file = tiny_gguf.write(tmp_path / "tiny.gguf", **given)
        engine = open_engine(str(file), engine="llamacpp", n_threads=1, **(options or {}))
        assert isinstance(engine, LlamaCppEngine)
        return engine

    return make


@pytest.fixture
def shifts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """By how much positions are moved, each time."""
    seen: list[int] = []
    plain = Seat.shift

    def spy(self: Seat, start: int, by: int) -> None:
        seen.append(by)
        plain(self, start, by)

    monkeypatch.setattr(Seat, "shift", spy)
    return seen


def stream_of(engine: LlamaCppEngine, window: Window | None, **options: Any) -> LlamaCppStream:
    return engine.open(window, **options)


# When keys are turned.


@pytest.mark.parametrize("chunk", [1, 1000])
def test_gaps_are_closed_many_positions_at_a_time_whatever_the_block(build: Build, shifts: list[int], chunk: int):
    engine = build(context_length=1024)
    shifts.clear()
    stream = engine.open(Window(budget=300, pins=4, block=1))
    for start in range(0, 1000, chunk):
        stream.feed(TEXT[start : start + chunk])
    assert shifts == [-64] * ((1000 - 300 - 1) // 64)


def test_a_window_without_pins_is_turned_only_when_positions_run_out(build: Build, shifts: list[int]):
    engine = build(context_length=1024)
    shifts.clear()
    stream = engine.open(Window(budget=100, block=4))
    stream.feed(TEXT[:1000])
    assert shifts == []
    stream.feed(TEXT[:900])
    assert shifts == [-924]


def test_without_reindexing_nothing_is_turned(build: Build, shifts: list[int]):
    engine = build(context_length=1024)
    shifts.clear()
    stream = engine.open(Window(budget=100, pins=4, block=4), reindex=False)
    stream.feed(TEXT)
    assert shifts == []


def test_walking_the_window_to_the_pins_is_walking_the_pins_to_the_window(build: Build):
    """The twin turns the other keys: only the pins, forward. Distances are the same, so predictions are."""
    engine = build(context_length=1024, options=SHARP)
    stream = stream_of(engine, Window(budget=400, pins=8, block=8))
    stream.feed(TEXT[:300])
    stream.evict(284)
    logits = stream.feed(TEXT[300:301])
    assert stream._gap == 0
    twin = engine._pool.take(401)
    twin.decode(TEXT[:300], 0)
    twin.remove(8, 292)
    call, context = engine.model.library.call, twin.context
    call.llama_memory_seq_add(context.memory, twin.number, 0, 8, 284)
    expected = twin.decode(TEXT[300:301], 300)[0]
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-3)
    left = stream_of(engine, stream.window, reindex=False)
    left.feed(TEXT[:300])
    left.evict(284)
    assert np.abs(left.feed(TEXT[300:301]) - expected).max() > 1e-2


@pytest.mark.parametrize("kind", ["f32", "f16", "q8_0", "q4_0"])
def test_one_conversation_s_evictions_leave_every_bit_of_another_alone(build: Build, kind: str):
    engine = build(context_length=512, options={"type_k": kind, "n_seq_max": 3})
    quiet = [stream_of(engine, Window(budget=200, pins=4, block=4)) for _ in range(2)]
    busy = stream_of(engine, Window(budget=200, pins=4, block=4))
    for stream in quiet:
        stream.feed(TEXT[:150])
    states = [stream._open().state() for stream in quiet]
    busy.feed(TEXT[:900])
    assert len({stream._open().context for stream in (*quiet, busy)}) == 1
    for stream, state in zip(quiet, states, strict=True):
        np.testing.assert_array_equal(stream._open().state(), state)


# Saving.


def test_nothing_is_saved_between_a_shift_and_the_next_decode(build: Build, tmp_path: Path):
    """Positions are new then and keys are not; it would load without an error."""
    engine = build(context_length=512)
    stream = engine.open(Window(budget=100, pins=4, block=4), reindex=False)
    stream.feed(TEXT[:50])
    stream.skip(300)
    with pytest.raises(CacheStateError, match="the keys are not turned yet; feed a token, then save"):
        stream.save(tmp_path / "s")
    stream.feed(TEXT[50:51])
    stream.save(tmp_path / "s")


@pytest.mark.parametrize("fed", [301, 364, 365, 366, 429])
def test_a_stream_saved_around_an_eviction_goes_on_the_same(build: Build, tmp_path: Path, fed: int):
    """Right before, at and after the steps whose gap is closed at the next decode."""
    engine = build(context_length=1024, options=SHARP)
    stream = stream_of(engine, Window(budget=300, pins=4, block=1))
    stream.feed(TEXT[:fed])
    stream.save(tmp_path / "s")
    again = engine.restore(tmp_path / "s", stream.window).stream
    np.testing.assert_allclose(again.feed(TEXT[fed : fed + 9]), stream.feed(TEXT[fed : fed + 9]), rtol=0, atol=1e-4)


def test_a_state_of_another_library_is_refused(build: Build, tmp_path: Path):
    engine = build()
    window = Window(budget=40, pins=4)
    stream = engine.open(window)
    stream.feed(TEXT[:60])
    snapshot = stream.snapshot()
    other = replace(snapshot, state={**snapshot.state, "library": "0.0.1"})
    other.write(tmp_path / "s")
    with pytest.raises(SnapshotError, match=r"was written by llama\.cpp 0\.0\.1, and this is"):
        engine.restore(tmp_path / "s", window)


def test_a_state_that_llama_cpp_does_not_take_up_is_refused(build: Build, tmp_path: Path):
    engine = build()
    window = Window(budget=40, pins=4)
    stream = engine.open(window)
    stream.feed(TEXT[:60])
    snapshot = stream.snapshot()
    cells = snapshot.parts["cells"]
    cut = replace(snapshot, parts={"cells": replace(cells, array=cells.array[:-100])})
    gap = replace(snapshot, state={**snapshot.state, "gap": 7})
    for wrong in (cut, gap):
        wrong.write(tmp_path / "s")
        with pytest.raises(SnapshotError, match=r"holds a state that llama\.cpp does not take up"):
            engine.restore(tmp_path / "s", window)
    assert all(context.idle for context in engine._pool._contexts if context is not stream._open().context)


def test_weights_and_kinds_of_keys_have_fingerprints_of_their_own(build: Build):
    prints = [
        build(seed=seed, options=options).fingerprint
        for seed, options in ((0, {}), (1, {}), (0, {"type_k": "q8_0"}), (0, {"type_v": "q8_0"}), (0, {}))
    ]
    assert len(set(prints)) == 4 and prints[0] == prints[-1]


# Memory.


def test_a_context_goes_with_its_last_stream(build: Build):
    engine = build(options={"n_seq_max": 2})
    window = Window(budget=40, pins=4)
    streams = [engine.open(window) for _ in range(3)]
    assert [len(context.free) for context in engine._pool._contexts] == [0, 1]
    streams[0].close()
    streams[2].close()
    assert [len(context.free) for context in engine._pool._contexts] == [1]
    del streams
    gc.collect()
    assert engine._pool._contexts == []


def test_a_seat_is_clean_for_who_comes_next(build: Build):
    engine = build(options={"n_seq_max": 2, **SHARP})
    window = Window(budget=40, pins=4)
    other, first = engine.open(window), engine.open(window)
    expected = first.feed(TEXT[:100])
    first.close()
    second = engine.open(window)
    np.testing.assert_allclose(second.feed(TEXT[:100]), expected, rtol=0, atol=1e-4)
    other.close()


def test_a_stream_that_keeps_everything_grows(build: Build):
    engine = build(context_length=4096, options=SHARP)
    stream = engine.open(None)
    logits, sizes = np.empty(0), []
    for start in range(0, 1500, 50):
        logits = stream.feed(TEXT[start : start + 50])
        sizes.append(stream.nbytes)
    cells = [size // engine.examined.cell_bytes for size in sorted(set(sizes))]
    assert cells == [512, 1024, 2048]
    whole = engine.open(None)
    np.testing.assert_allclose(whole.feed(TEXT), logits, rtol=0, atol=1e-4)


def test_a_closed_engine_s_streams_say_so(build: Build):
    engine = build()
    stream = engine.open(None)
    stream.feed(TEXT[:5])
    engine.close()
    with pytest.raises(CacheStateError, match="the engine is closed"):
        stream.feed(TEXT[:5])
    stream.close()


def test_what_is_said_of_memory_is_what_the_state_takes(build: Build):
    for kind, per_head in (("f32", 256), ("f16", 128), ("q8_0", 68), ("q4_0", 36)):
        engine = build(options={"type_k": kind, "type_v": kind})
        assert engine.examined.cell_bytes == tiny_gguf.LAYERS * tiny_gguf.KV_HEADS * 2 * per_head
        assert engine.open(Window(budget=40)).nbytes == 256 * engine.examined.cell_bytes


# What is refused.


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"type_k": "bf16"}, UnknownName, "unknown type_k 'bf16'; known: f16, f32, q4_0, q8_0"),
        ({"type_v": "q5_1"}, UnknownName, "unknown type_v 'q5_1'"),
        ({"flash_attn": "maybe"}, UnknownName, "unknown flash_attn 'maybe'; known: auto, off, on"),
        ({"type_v": "q8_0", "flash_attn": "off"}, UsageError, "values of q8_0 need flash attention"),
        ({"n_threads": 0}, UsageError, "n_threads must be an integer from 1 to 256, got 0"),
        ({"n_seq_max": 2.5}, UsageError, "n_seq_max must be an integer from 1 to 256, got 2.5"),
        ({"n_gpu_layers": -2}, UsageError, "n_gpu_layers must be an integer of at least 0, or -1 for all, got -2"),
        ({"dtype": "float32"}, UnknownName, "unknown option of the engine llamacpp 'dtype'; known: .*type_k"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_an_option_that_cannot_be_honoured_is_refused(
    tmp_path: Path, options: dict[str, Any], error: type[HeadwaterError], words: str
):
    require_llamacpp()
    file = tiny_gguf.write(tmp_path / "tiny.gguf")
    with pytest.raises(error, match=words):
        open_engine(str(file), engine="llamacpp", **options)


def test_a_policy_that_picks_in_every_head_is_refused_by_name(build: Build):
    engine = build()
    for name in ("random", "h2o"):
        with pytest.raises(UnsupportedCall, match=f"{name} keeps a set of its own in every head, and llama.cpp"):
            engine.open(policy(name, budget=100))
    with pytest.raises(HeadwaterError, match="h2o"):
        Chat.open(engine, policy="h2o", budget=100)


def test_quantised_keys_need_heads_of_64(build: Build):
    with pytest.raises(UsageError, match=r"type_k q8_0 needs heads of a multiple of 64 .* has 32; take type_k f16"):
        build(head=32, options={"type_k": "q8_0"})
    build(head=32)


@pytest.mark.parametrize(
    ("architecture", "why"),
    [("mamba", "keeps what it read in a recurrent state"), ("qwen2vl", "llama.cpp cannot move positions of")],
)
def test_a_model_that_cannot_forget_is_refused_by_name_and_runs_without_evicting(
    build: Build, architecture: str, why: str
):
    engine = build(architecture=architecture)
    with pytest.raises(UnsupportedModel, match=f"{why}.* take the policy full"):
        engine.open(Window(budget=40, pins=4))
    with pytest.raises(UnsupportedModel, match=why):
        Chat.open(engine, budget=100)
    stream = engine.open(None)
    stream.feed(TEXT[:20])
    assert stream.held == 20


def test_a_cache_that_does_not_turn_its_keys_rightly_is_refused(build: Build, monkeypatch: pytest.MonkeyPatch):
    plain = Seat.shift

    def losing(self: Seat, start: int, by: int) -> None:
        self.remove(start + 3, start + 5)
        plain(self, start, by)

    monkeypatch.setattr(Seat, "shift", losing)
    engine = build()
    with pytest.raises(UnsupportedModel, match=r"predicts otherwise once its keys were turned .* \(KL divergence"):
        engine.open(Window(budget=40, pins=4))


@pytest.mark.parametrize("architecture", ["gemma3", "gpt2"])
def test_other_kinds_of_attention_and_positions(build: Build, tmp_path: Path, architecture: str):
    """Layers with a sliding window of 16 of their own; positions that are learned, of which none may be passed."""
    engine = build(architecture=architecture, options=SHARP)
    window = Window(budget=100, pins=4, block=3)
    one, whole = engine.open(window), engine.open(window)
    stepwise = [one.feed([token]) for token in TEXT[:400]]
    np.testing.assert_allclose(whole.feed(TEXT[:400]), stepwise[-1], rtol=0, atol=1e-4)
    whole.save(tmp_path / "s")
    again = engine.restore(tmp_path / "s", window).stream
    np.testing.assert_allclose(again.feed(TEXT[:50]), whole.feed(TEXT[:50]), rtol=0, atol=1e-4)
    if architecture == "gpt2":
        with pytest.raises(UnsupportedModel, match=r"has no rotary positions .*leave reindex on"):
            engine.open(window, reindex=False)
    else:
        again.feed(TEXT[:1])
        again.save(tmp_path / "t")
        with pytest.raises(CacheStateError, match="at most 0 can be taken back"):
            engine.restore(tmp_path / "t", window).stream.rollback(1)


def test_layers_with_a_window_of_their_own_hold_as_much_as_the_others(build: Build):
    """By default llama.cpp gives them less, and then ends the process when positions move."""
    engine = build(architecture="gemma3", context_length=2048)
    stream = engine.open(Window(budget=1000, pins=4, block=100))
    stream.feed(TEXT[:1400])
    assert stream.held <= 1000
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Seat, "can_shift", False)
        with pytest.raises(UnsupportedModel, match=r"cannot move positions of .* in a context of 1001 tokens"):
            engine.open(stream.window)


def test_conversations_in_threads_share_a_context(build: Build):
    engine = build(context_length=1024, options={"n_seq_max": 4, **SHARP})
    said: dict[int, list[np.ndarray]] = {}

    def run(number: int, into: dict[int, list[np.ndarray]]) -> None:
        stream = engine.open(Window(budget=200, pins=4, block=4))
        into[number] = [stream.feed(TEXT[number + at : number + at + 7]) for at in range(0, 700, 7)]
        stream.close()

    threads = [threading.Thread(target=run, args=(number, said)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    alone: dict[int, list[np.ndarray]] = {}
    for number in range(4):
        run(number, alone)
        np.testing.assert_allclose(said[number], alone[number], rtol=0, atol=1e-4)


BAD_FILES: dict[str, tuple[Callable[[Path], object], type[HeadwaterError], str]] = {
    "missing": (lambda file: None, InputFileError, "no such file"),
    "another kind": (lambda file: file.write_bytes(b"PK\3\4zip"), UsageError, "not a GGUF file: it begins with b'PK"),
    "empty": (lambda file: file.write_bytes(b""), UsageError, "not a GGUF file"),
    "cut in the header": (
        lambda file: _cut(file, 200),
        ModelFileError,
        "cannot be loaded by llama.cpp .* remaining file",
    ),
    "cut in the weights": (lambda file: _cut(file, -5000), ModelFileError, "not within the file bounds"),
    "unknown architecture": (
        lambda file: tiny_gguf.write(file, architecture="wonder"),
        ModelFileError,
        "unknown model architecture: 'wonder'",
    ),
    "fewer rows than tokens": (lambda file: tiny_gguf.write(file, rows=200), ModelFileError, "has wrong shape"),
    "more rows than tokens": (lambda file: tiny_gguf.write(file, rows=300), ModelFileError, "has wrong shape"),
}


def _cut(file: Path, stop: int) -> None:
    tiny_gguf.write(file)
    file.write_bytes(file.read_bytes()[:stop])


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_file_that_is_no_model_is_refused(tmp_path: Path, name: str):
    require_llamacpp()
    make, error, words = BAD_FILES[name]
    file = tmp_path / "bad.gguf"
    make(file)
    with pytest.raises(error, match=words):
        open_engine(str(file), engine="llamacpp")


def test_a_model_without_a_chat_template_says_how_to_give_one(build: Build):
    engine = build(template=None)
    with pytest.raises(UnsupportedModel, match="has no chat template; give one as Jinja text"):
        engine.render([{"role": "user", "content": "hi"}], open_answer=True)
    with pytest.raises(UnsupportedModel, match="--template FILE"):
        Chat.open(engine, budget=100)
    assert (
        build(template=None, options={"template": "{{ messages[0].content }}!"}).render(
            [{"role": "user", "content": "hi"}], open_answer=True
        )
        == "hi!"
    )


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% if %}", "is not one that Jinja reads: .* in line 1"),
        ("{{ raise_exception('only users') }}", "refuses the roles user: only users"),
        ("{{ messages[7].content.nothing }}", "refuses the roles user"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused(build: Build, template: str, words: str):
    engine = build(template=template)
    with pytest.raises(UnsupportedModel, match=words):
        engine.render([{"role": "user", "content": "hi"}], open_answer=True)


def test_a_trained_length_below_the_budget_is_refused(build: Build):
    engine = build(context_length=128)
    with pytest.raises(BudgetError, match="trained for 128; lower the budget to 127"):
        Chat.open(engine, budget=1024)


def test_no_room_for_the_pins_is_refused(build: Build):
    engine = build(context_length=512)
    with pytest.raises(BudgetError, match=r"the system prompt takes \d+ tokens and the budget is 100"):
        Chat.open(engine, system="long " * 40, budget=100)


@pytest.mark.parametrize(
    ("window", "quantised", "step"),
    [
        (Window(budget=1024, pins=4, block=1), False, 64),
        (Window(budget=4096, pins=96, block=1), False, 250),
        (Window(budget=4096, pins=96, block=250), True, 250),
        (Window(budget=8000, pins=4, block=1), True, 191),  # no further than the trained length
        (Window(budget=8128, pins=8000, block=1), False, 63),
        (Window(budget=8191, pins=8180, block=1), False, 1),
        (Window(budget=8191, pins=4, block=300), True, 1),  # every eviction closes its own gap
        (Window(budget=1024, pins=0, block=1), True, 7167),
        (Window(budget=8191, pins=0, block=1), True, 64),
    ],
    ids=str,
)
def test_how_large_a_gap_may_grow(window: Window, quantised: bool, step: int):
    assert reindex_step(window, context_length=8192, rotary=True, quantised=quantised, name="it") == step


@pytest.mark.parametrize(
    ("window", "quantised", "least"),
    [
        (Window(budget=8191, pins=4, block=1), False, 128),
        (Window(budget=8100, pins=4, block=90), False, 127),
        (Window(budget=8180, pins=8170, block=1), True, 32),
    ],
    ids=str,
)
def test_keys_are_not_worn_out(window: Window, quantised: bool, least: int):
    with pytest.raises(BudgetError, match=f"less than {least} at a time would wear the keys out: lower the budget to"):
        reindex_step(window, context_length=8192, rotary=True, quantised=quantised, name="it")


def test_a_window_without_re_indexing_keeps_a_token_beside_its_pins(build: Build):
    stream = build().open(Window(budget=40, pins=4), reindex=False)
    stream.feed(TEXT[:20])
    with pytest.raises(UsageError, match="cannot evict all 16 unpinned tokens without re-indexing; evict at most 15"):
        stream.evict(16)
    stream.evict(15)
    stream.feed(TEXT[:3])
    assert stream.kept.tolist() == [0, 1, 2, 3, 19, 20, 21, 22]


def test_a_decode_that_fails_leaves_the_seat_as_it_was(build: Build):
    engine = build(context_length=512, options=SHARP)
    full, fresh = engine._pool.take(256), engine._pool.take(256)
    for seat in (full, fresh):
        seat.decode(TEXT[:200], 0)
    with pytest.raises(CacheStateError, match=r"did not decode 100 tokens at position 200 \(code 1\): it has no room"):
        full.decode(TEXT[200:300], 200)
    with pytest.raises(CacheStateError, match=r"did not decode 2 tokens at position 150 \(code -1\): "):
        fresh.decode(TEXT[:2], 150)
    np.testing.assert_array_equal(full.decode(TEXT[200:210], 200), fresh.decode(TEXT[200:210], 200))


def test_threads_are_those_that_the_process_may_use(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert usable_threads() == 3
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert usable_threads() >= 1
    assert Settings().n_threads == 1


def test_divergence_is_nothing_between_equal_predictions():
    logits = np.random.default_rng(0).normal(size=50).astype(np.float32)
    assert divergence(logits, logits + 3) == pytest.approx(0, abs=1e-6)
    assert divergence(logits, -logits) > 0.1


def test_a_number_of_threads_that_nobody_gave_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    require_llamacpp()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    file = str(tiny_gguf.write(tmp_path / "tiny.gguf"))
    engine = open_engine(file, engine="llamacpp")
    assert engine.choices == ("llama.cpp runs on 1 threads; n_threads says another number",)
    assert open_engine(file, engine="llamacpp", n_threads=1).choices == ()


def test_a_tokenizer_that_puts_a_space_before_a_text_takes_it_off_again(build: Build, monkeypatch: pytest.MonkeyPatch):
    """SentencePiece does; its pieces are joined here, and only the first space of a text is its own."""
    plain, model = build().model, build().model
    assert plain.decode(plain.encode("  a b", special=False)) == "  a b"
    monkeypatch.setattr(model, "_number", lambda name: 1)  # the kind of its vocabulary
    assert model._leading_space
    assert model.decode(model.encode("  a b", special=False)) == " a b"
