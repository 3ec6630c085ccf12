"""Recorded traces: what is written comes back, in bounded memory, and what is damaged is refused by name."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import zarr

from headwater.errors import InputFileError, MissingExtra, UsageError
from headwater.traces import Head
from headwater.traces.store import RecordedTrace, TraceWriter, extract
from headwater.traces.zarray import Chunks, _Codecs, widen
from tests.traces.recordings import append, facts, record, weights

LONG = 1100
"""Tokens: more than two columns of chunks, and no whole number of bands."""


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> tuple[RecordedTrace, np.ndarray]:
    of = facts(LONG)
    whole = weights(of)
    return record(tmp_path_factory.mktemp("long") / "trace", of, whole), whole


@pytest.fixture
def copy(long: tuple[RecordedTrace, np.ndarray], tmp_path: Path) -> Path:
    """A folder of its own, to be damaged."""
    return Path(shutil.copytree(long[0].folder, tmp_path / "trace"))


# What is written comes back.


def test_the_trace_is_what_was_written(long: tuple[RecordedTrace, np.ndarray]):
    trace, whole = long
    assert (trace.tokens, trace.planned, trace.complete) == (LONG, LONG, True)
    assert trace.name == "tiny, a text"
    assert trace.heads == tuple(Head(layer=layer, head=head) for layer in (0, 1, 5) for head in (0, 2))
    np.testing.assert_array_equal(trace.whole(), whole.reshape(6, LONG, LONG)[:, 1:].astype(np.float32))


@pytest.mark.parametrize("chunk_bytes", [1, 40_000, 1_000_000, 3_000_000, 64 << 20])
def test_chunks_of_any_size_say_the_same_and_stay_within_it(long: tuple[RecordedTrace, np.ndarray], chunk_bytes: int):
    trace, whole = long
    expected, step = whole.reshape(6, LONG, LONG).astype(np.float32), 1
    for chunk in trace.chunks(chunk_bytes):
        assert chunk.first == step
        assert chunk.weights.dtype == np.float32
        assert chunk.weights.nbytes <= max(chunk_bytes, 6 * 4 * LONG)
        positions = chunk.weights.shape[2]
        assert positions == chunk.steps.stop
        np.testing.assert_array_equal(chunk.weights, expected[:, chunk.first : chunk.steps.stop, :positions])
        step = chunk.steps.stop
    assert step == LONG


def test_no_file_is_read_twice_unless_a_chunk_is_smaller_than_a_band(
    long: tuple[RecordedTrace, np.ndarray], monkeypatch: pytest.MonkeyPatch
):
    trace, _ = long
    read = list[Path]()
    decode = _Codecs.decode
    monkeypatch.setattr(_Codecs, "decode", lambda self, file: read.append(file) or decode(self, file))
    for _ in trace.chunks(6 * LONG * 4 * 100):  # 100 steps, and 64 lie together
        pass
    assert len(read) == len(set(read)) == sum(path.is_file() for path in (trace.folder / "c").rglob("*"))


def test_reading_takes_one_chunk_and_little_beside_it(long: tuple[RecordedTrace, np.ndarray]):
    trace, _ = long
    size = 8 << 20
    next(trace.chunks(size))
    tracemalloc.start()
    for _ in trace.chunks(size):
        pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * size


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("tokens", [2, 63, 64, 65, 512, 513])
def test_every_length_and_type_comes_back(tmp_path: Path, tokens: int, dtype: str):
    of = facts(tokens, layers=[3], heads=[1], dtype=dtype)
    whole = weights(of)
    trace = record(tmp_path / "trace", of, whole)
    np.testing.assert_array_equal(trace.whole(), whole[0, :, 1:].astype(np.float32))
    assert trace.facts == of


@pytest.mark.parametrize("block", [64, 192, 320])
def test_blocks_of_several_bands_make_the_same_files(tmp_path: Path, block: int):
    of = facts(600)
    whole = weights(of)
    append(TraceWriter(tmp_path / "a", of), whole, 600)
    append(TraceWriter(tmp_path / "b", of), whole, 600, block)
    assert files(tmp_path / "a") == files(tmp_path / "b")


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_it_is_an_array_that_plain_zarr_reads(long: tuple[RecordedTrace, np.ndarray]):
    trace, whole = long
    array = cast(Any, zarr.open_array(store=str(trace.folder), mode="r"))
    np.testing.assert_array_equal(array[:], whole)
    described = json.loads((trace.folder / "zarr.json").read_text())
    assert described["dimension_names"] == ["layer", "head", "token", "position"]
    assert [codec["name"] for codec in described["codecs"]] == ["bytes", "blosc", "crc32c"]
    assert described["attributes"]["tokens"] == list(range(LONG))


def test_chunks_above_the_diagonal_have_no_file(long: tuple[RecordedTrace, np.ndarray]):
    trace, _ = long
    for path in (trace.folder / "c").rglob("*"):
        if path.is_file():
            band, column = int(path.parent.name), int(path.name)
            assert column * 512 < (band + 1) * trace.band, path
    assert not list(trace.folder.rglob("*.partial"))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(
    ("layers", "heads", "tokens"), [(30, 9, 2048), (30, 9, 4096), (30, 9, 8192), (32, 32, 8192), (1, 1, 300), (2, 3, 2)]
)
def test_a_band_of_all_rows_fits_the_chunk_that_a_reader_takes(layers: int, heads: int, tokens: int, dtype: str):
    chunks = Chunks.fitting((layers, heads, tokens, tokens), dtype)
    assert chunks.positions % chunks.tokens == 0
    assert chunks.tokens == 1 or chunks.tokens * layers * heads * tokens * 4 <= 64 << 20
    assert np.prod(chunks.shape) * np.dtype(dtype).itemsize <= 2 << 20


def test_half_precision_widens_exactly():
    every = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    for given in (every[:0x7C00], every[0x7C00:0x8000], every[0x8000:], every, every.astype(np.float32)):
        np.testing.assert_array_equal(widen(given).view(np.uint32), given.astype(np.float32).view(np.uint32))


# A recording that is not finished.


def test_a_beginning_is_a_shorter_trace_and_says_so(tmp_path: Path):
    of = facts()
    whole = weights(of)
    trace = record(tmp_path / "trace", of, whole, stop=128)
    assert (trace.tokens, trace.planned, trace.complete) == (128, 300, False)
    assert trace.name == "tiny, a text (128 of 300 tokens)"
    np.testing.assert_array_equal(trace.whole(), whole.reshape(6, 300, 300)[:, 1:128, :128].astype(np.float32))


def test_a_recording_goes_on_where_it_ended_and_ends_up_the_same(tmp_path: Path):
    of = facts()
    whole = weights(of)
    append(TraceWriter(tmp_path / "once", of), whole, 300)
    append(TraceWriter(tmp_path / "twice", of), whole, 128)
    (tmp_path / "twice" / "zarr.1234.partial").write_bytes(b"killed here")
    (tmp_path / "twice" / "c" / "0" / "0" / "2").mkdir(parents=True)
    (tmp_path / "twice" / "c" / "0" / "0" / "2" / "0").write_bytes(b"and here")
    writer = TraceWriter(tmp_path / "twice", replace(of, created="later", headwater="9.9"))
    assert writer.recorded == 128
    append(writer, whole, 300)
    assert writer.complete
    assert files(tmp_path / "once") == files(tmp_path / "twice")


def killed_at_once(folder: Path) -> None:
    """A folder whose recording ended before its first band was complete."""
    of = facts()
    append(TraceWriter(folder, of), weights(of), 64)
    edited(folder, recorded=0)


def test_nothing_is_made_before_there_is_something_to_write(tmp_path: Path):
    assert TraceWriter(tmp_path / "trace", facts()).recorded == 0
    assert list(tmp_path.iterdir()) == []


def test_nothing_recorded_yet_is_refused_and_can_go_on(tmp_path: Path):
    killed_at_once(tmp_path / "trace")
    with pytest.raises(InputFileError, match=r"holds 0 of 300 tokens, which is no step yet; .* the same command"):
        RecordedTrace(tmp_path / "trace")
    assert TraceWriter(tmp_path / "trace", facts()).recorded == 0


def test_a_recording_killed_while_its_folder_was_made_can_begin_again(tmp_path: Path):
    (tmp_path / "zarr.12ab.partial").write_bytes(b'{"shape": [')
    trace = record(tmp_path, facts(), weights(facts()))
    assert trace.complete


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "other"}, "model is 'tiny' there and 'other' now"),
        ({"text_sha256": "ef"}, "text_sha256 is 'cdcd"),
        ({"tokens": tuple(range(299))}, r"tokens is \[0, 1, .*299\] there"),
        ({"layers": (0, 1, 2)}, r"layers is \[0, 1, 5\] there and \[0, 1, 2\] now"),
        ({"heads": (0, 1)}, "heads is"),
        ({"dtype": "float32"}, "dtype is 'float16' there and 'float32' now"),
        ({"rotary": {"rope_theta": 1.0}}, "rotary is"),
        ({"tokenizer_sha256": "x", "precision": "bfloat16"}, "precision is .*; tokenizer_sha256 is"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_another_recording_is_not_continued_and_what_differs_is_named(
    tmp_path: Path, changes: dict[str, Any], words: str
):
    of = facts()
    append(TraceWriter(tmp_path / "trace", of), weights(of), 64)
    with pytest.raises(UsageError, match=f"holds another recording: .*{words}.* Take another folder"):
        TraceWriter(tmp_path / "trace", replace(of, **changes))
    assert RecordedTrace(tmp_path / "trace").tokens == 64


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lambda whole: (64, whole[:, :, 64:128, :128]), "tokens 64 to 127 do not come next: 0 of 300"),
        (lambda whole: (0, whole[:, :, :63, :63]), "63 tokens are no whole bands of 64"),
        (
            lambda whole: (0, whole[:, :, :64, :65]),
            r"\[3, 2, 64, 65\] of float16; \[3, 2, 64, 64\] of float16 come next",
        ),
        (lambda whole: (0, whole[:2, :, :64, :64]), r"weights are \[2, 2, 64, 64\]"),
        (lambda whole: (0, whole[:, :, :64, :64].astype(np.float32)), "of float32; .* of float16 come next"),
    ],
)
def test_only_the_next_tokens_are_taken(
    tmp_path: Path, given: Callable[[np.ndarray], tuple[int, np.ndarray]], words: str
):
    of = facts()
    writer = TraceWriter(tmp_path / "trace", of)
    with pytest.raises(UsageError, match=words):
        writer.append(*given(weights(of)))
    assert writer.recorded == 0


# What cannot be read.


def chunk_file(folder: Path) -> Path:
    return folder / "c" / "0" / "0" / "9" / "1"


def flip(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a bit in the middle": lambda file: flip(file, file.stat().st_size // 2),
    "a bit of the header": lambda file: flip(file, 0),
    "a bit of the checksum": lambda file: flip(file, -1),
    "the last byte cut": lambda file: file.write_bytes(file.read_bytes()[:-1]),
    "half": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "three bytes left": lambda file: file.write_bytes(file.read_bytes()[:3]),
    "empty": lambda file: file.write_bytes(b""),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_chunk_is_refused_by_name(copy: Path, kind: str):
    DAMAGE[kind](chunk_file(copy))
    trace = RecordedTrace(copy)
    with pytest.raises(InputFileError, match=f"{chunk_file(copy)} is damaged"):
        trace.whole()


def test_a_missing_chunk_is_refused_by_name_and_is_not_zeros(copy: Path):
    chunk_file(copy).unlink()
    with pytest.raises(InputFileError, match=f"{chunk_file(copy)} is missing, and with it weights of the trace"):
        RecordedTrace(copy).whole()


def test_what_comes_before_the_damage_is_read(copy: Path):
    chunk_file(copy).unlink()
    chunks = RecordedTrace(copy).chunks(6 * LONG * 4 * 64)
    assert [next(chunks).steps.stop for _ in range(9)] == [64 * band for band in range(1, 10)]
    with pytest.raises(InputFileError, match="is missing"):
        next(chunks)


def edited(folder: Path, **changes: Any) -> None:
    """The metadata with other attributes; None takes one out."""
    path = folder / "zarr.json"
    described = json.loads(path.read_text())
    for name, value in changes.items():
        described["attributes"][name] = value
        if value is None:
            del described["attributes"][name]
    path.write_text(json.dumps(described))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": 2}, "format version 2, and this Headwater reads version 1; update Headwater"),
        ({"version": None}, "format version None"),
        ({"format": "other"}, "no trace that Headwater recorded"),
        ({"format": None}, "no trace that Headwater recorded"),
        ({"recorded": LONG + 1}, f"contradicts itself: {LONG + 1} of {LONG} tokens are said to be recorded"),
        ({"recorded": -1}, "contradicts itself: -1 of"),
        ({"recorded": None}, "says that recorded is None"),
        ({"recorded": True}, "says that recorded is True"),
        ({"tokens": [1, 2, 3]}, r"its array is \[3, 2, 1100, 1100\], and 3 layers, 2 heads and 3 tokens are listed"),
        ({"tokens": ["a"] * LONG}, "says that tokens is"),
        ({"layers": [0, 1]}, "2 layers, 2 heads"),
        ({"layers": [1, 0, 5]}, "no ascending list"),
        ({"heads": [0, 0]}, "no ascending list"),
        ({"heads": [-1, 0]}, "no ascending list"),
        ({"dtype": "float32"}, "its array is of float16, and dtype says 'float32'"),
        ({"trained_length": 5}, "more than the trained length of 5"),
        ({"model": 3}, "says that model is 3"),
        ({"model": None}, "says that model is None"),
        ({"rotary": "none"}, "says that rotary is 'none'"),
    ],
    ids=str,
)
def test_attributes_that_contradict_are_refused(copy: Path, changes: dict[str, Any], words: str):
    edited(copy, **changes)
    with pytest.raises(InputFileError, match=words) as refused:
        RecordedTrace(copy)
    assert str(copy) in str(refused.value)


def no_folder(folder: Path) -> None:
    shutil.rmtree(folder)


def empty_folder(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def file_instead(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("hello")


def metadata(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "zarr.json").write_text(text)


def foreign_array(folder: Path) -> None:
    shutil.rmtree(folder)
    zarr.create_array(store=str(folder), shape=(3, 3), dtype="float32")


def other_rank(folder: Path) -> None:
    described = json.loads((folder / "zarr.json").read_text())
    shutil.rmtree(folder)
    zarr.create_array(store=str(folder), shape=(3, 3), dtype="float32", attributes=described["attributes"])


def codec(name: str, **configuration: Any) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        described = json.loads((folder / "zarr.json").read_text())
        described["codecs"][1] = {"name": name, "configuration": configuration}
        (folder / "zarr.json").write_text(json.dumps(described))

    return change


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (no_folder, "there is no .*trace, so it is no recorded trace"),
        (empty_folder, "has no zarr.json, so it is no recorded trace"),
        (file_instead, "zarr.json cannot be read|has no zarr.json"),
        (metadata("{"), "zarr.json cannot be read"),
        (metadata("[]"), "no trace that Headwater recorded"),
        (metadata(""), "zarr.json cannot be read"),
        (foreign_array, "no trace that Headwater recorded"),
        (other_rank, "an array of 2 dimensions; a trace has 4"),
        (codec("of tomorrow"), "zarr.json does not describe a Zarr array"),
        (codec("zstd", level=1, checksum=False), r"other codecs than a trace has .*: bytes, zstd, crc32c"),
    ],
    ids=[
        "no folder",
        "empty",
        "a file",
        "cut",
        "a list",
        "blank",
        "foreign",
        "two dimensions",
        "unknown codec",
        "other codec",
    ],
)
def test_what_is_no_trace_is_refused_by_name(copy: Path, make: Callable[[Path], object], words: str):
    make(copy)
    with pytest.raises(InputFileError, match=words) as refused:
        RecordedTrace(copy)
    assert str(copy) in str(refused.value)


def test_a_folder_with_something_else_in_it_is_not_written_to(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputFileError, match="is there already and is no recorded trace; take another folder"):
        TraceWriter(tmp_path, facts())
    with pytest.raises(InputFileError, match="is there already"):
        TraceWriter(tmp_path / "notes.txt", facts())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt"]


def test_without_zarr_the_extra_is_named(copy: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "zarr", None)
    with pytest.raises(MissingExtra, match=r"zarr is not installed; run: pip install 'headwater\[lab\]'"):
        RecordedTrace(copy)
    with pytest.raises(MissingExtra, match="zarr is not installed"):
        TraceWriter(copy.parent / "other", facts())


# A part of a trace.


def test_an_extract_is_the_part_that_was_asked_for(long: tuple[RecordedTrace, np.ndarray], tmp_path: Path):
    trace, whole = long
    part = extract(trace, tmp_path / "part", layers=[5, 0], heads=[2], tokens=600)
    assert part.heads == (Head(layer=0, head=2), Head(layer=5, head=2))
    assert part.tokens == part.planned == 600
    assert part.facts == trace.facts.part(layers=(0, 5), heads=(2,), tokens=600)
    np.testing.assert_array_equal(part.whole(), whole[[0, 2], 1, 1:600, :600].astype(np.float32))


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"layers": [2]}, "has no layer 2; it has 0, 1, 5"),
        ({"heads": [1]}, "has no head 1; it has 0, 2"),
        ({"tokens": LONG + 1}, f"has {LONG} tokens; an extract has 2 to as many, got {LONG + 1}"),
        ({"tokens": 1}, "got 1"),
    ],
    ids=str,
)
def test_an_extract_of_what_is_not_there_is_refused(
    long: tuple[RecordedTrace, np.ndarray], tmp_path: Path, asked: dict[str, Any], words: str
):
    with pytest.raises(UsageError, match=words):
        extract(long[0], tmp_path / "part", **{"layers": [0], "heads": [0], "tokens": 9, **asked})
    assert not (tmp_path / "part").exists()
