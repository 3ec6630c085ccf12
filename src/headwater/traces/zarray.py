"""The array on disk: weights as `[layers, heads, tokens, positions]` in Zarr v3, in compressed and checksummed chunks.

The only file that knows the format. Its metadata is made and read by zarr, so that other tools can read the array; the
chunks go through the two codecs directly, by as many threads as there are cores. Does not know what the numbers mean,
except that there are none above the diagonal: a chunk that lies there whole has no file, and one that should have a
file and has none is an error, not zeros.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Float32

from headwater.errors import InputFileError, MissingExtra
from headwater.traces.trace import CHUNK_BYTES

METADATA = "zarr.json"
UNFINISHED = ".partial"
"""How the name of the metadata ends while zarr writes it."""
FILE_BYTES = 2 << 20
"""About how large a chunk is before it is compressed."""
NARROWEST = 512
"""Positions in a chunk, at least."""
HIGHEST = 64
"""Tokens in a chunk, at most: what a recording can lose when it is killed."""
COMPRESSION = {"cname": "lz4", "clevel": 5, "shuffle": "bitshuffle", "blocksize": 0}
"""Of the codec blosc. The mantissa of an attention weight is noise, and only the bits above it can be saved: lz4 does
that at 1 GB/s a core, zstd saves an eighth more at a quarter of the speed."""
CHECKSUM_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """The shape of a chunk."""

    layers: int
    heads: int
    tokens: int
    positions: int

    @classmethod
    def fitting(cls, shape: tuple[int, int, int, int], dtype: str) -> Chunks:
        """Bands of as many tokens as a reader of `CHUNK_BYTES` takes at once, so that none is decoded twice; columns of
        a quarter of the positions or more; and as many layers as make a file of about `FILE_BYTES`."""
        layers, heads, tokens, _ = shape
        positions = max(NARROWEST, _power_of_two(tokens // 4))
        row = heads * positions * np.dtype(dtype).itemsize
        band = _power_of_two(min(HIGHEST, CHUNK_BYTES // (layers * heads * tokens * 4), FILE_BYTES // row))
        groups = -(-layers // max(1, FILE_BYTES // (row * band)))
        return cls(layers=-(-layers // groups), heads=heads, tokens=band, positions=positions)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """As an array has it."""
        return self.layers, self.heads, self.tokens, self.positions


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a chunk lies: its number in every dimension, and what it covers."""

    numbers: tuple[int, int, int, int]
    layers: slice
    tokens: range
    positions: range


class Triangle:
    """An array of which the lower triangle is written, band by band."""

    def __init__(self, array: Any, folder: Path) -> None:
        self._array, self._folder = array, folder
        layers, heads, tokens, positions = array.chunks
        self.chunks = Chunks(layers=layers, heads=heads, tokens=tokens, positions=positions)
        self.shape: tuple[int, int, int, int] = tuple(array.shape)
        self.dtype: np.dtype[Any] = array.dtype
        self._codecs = _Codecs(self.dtype, self.chunks)

    @classmethod
    def create(
        cls, folder: Path, shape: tuple[int, int, int, int], dtype: str, attributes: Mapping[str, Any]
    ) -> Triangle:
        """A new array in a folder that is empty or not there."""
        zarr = require_zarr()
        blosc = zarr.codecs.BloscCodec(**COMPRESSION, typesize=np.dtype(dtype).itemsize)
        array = zarr.create_array(
            store=str(folder),
            shape=shape,
            dtype=dtype,
            chunks=Chunks.fitting(shape, dtype).shape,
            compressors=[blosc, zarr.codecs.Crc32cCodec()],
            fill_value=0,
            dimension_names=("layer", "head", "token", "position"),
            attributes=dict(attributes),
        )
        return cls(array, folder)

    @classmethod
    def open(cls, folder: Path, *, write: bool = False) -> Triangle:
        """The array in a folder that has one. Raises InputFileError for an array that is not laid out as ours are."""
        zarr, metadata = require_zarr(), folder / METADATA
        try:
            array = zarr.open_array(store=str(folder), mode="r+" if write else "r", zarr_format=3)
        except (ValueError, KeyError, TypeError, zarr.errors.BaseZarrError) as error:
            raise InputFileError(f"{metadata} does not describe a Zarr array: {error}") from error
        if array.ndim != 4:
            raise InputFileError(f"{metadata} describes an array of {array.ndim} dimensions; a trace has 4")
        codecs = [codec.to_dict() for codec in array.metadata.codecs]
        blosc = {"name": "blosc", "configuration": {**COMPRESSION, "typesize": array.dtype.itemsize}}
        if codecs != [{"name": "bytes", "configuration": {"endian": "little"}}, blosc, {"name": "crc32c"}]:
            names = ", ".join(str(codec["name"]) for codec in codecs)
            raise InputFileError(
                f"{metadata} describes chunks in other codecs than a trace has (bytes, blosc with lz4, crc32c): {names}"
            )
        return cls(array, folder)

    @property
    def attributes(self) -> dict[str, Any]:
        """What the array says of itself."""
        return dict(self._array.attrs)

    def set(self, name: str, value: int) -> None:
        """Change one attribute; whoever reads meanwhile sees the old or the new one."""
        self._array.attrs[name] = value

    def write(self, first: int, weights: Float[np.ndarray, "layers heads tokens positions"]) -> None:
        """Whole bands of tokens, or the last ones, from `first` on; `positions` ends with the last of the tokens.

        A file that is cut off here belongs to no band that is said to be recorded.
        """

        def store(place: Place) -> None:
            rows = slice(place.tokens.start - first, place.tokens.stop - first)
            part = weights[place.layers, :, rows, place.positions.start : place.positions.stop]
            chunk = part
            if part.shape != self.chunks.shape:  # at the edges of the array, and where positions are still to come
                chunk = np.zeros(self.chunks.shape, dtype=self.dtype)
                chunk[: part.shape[0], :, : part.shape[2], : part.shape[3]] = part
            file = self._file(place)
            file.parent.mkdir(parents=True, exist_ok=True)
            self._codecs.encode(chunk, file)

        self._each(range(first, first + weights.shape[2]), store)

    def read(self, tokens: range, out: Float32[np.ndarray, "layers heads tokens positions"]) -> None:
        """The weights of consecutive tokens; `positions` ends with the last of them, zeros where a token pays nothing.

        Raises InputFileError for a chunk whose file is missing, cut short or altered, naming the file.
        """

        def load(place: Place) -> None:
            chunk = self._codecs.decode(self._file(place))
            rows = range(max(tokens.start, place.tokens.start), min(tokens.stop, place.tokens.stop))
            target = out[place.layers, :, rows.start - tokens.start : rows.stop - tokens.start]
            if last_of(place):
                target[..., place.positions.stop :] = 0
            target = target[..., place.positions.start : place.positions.stop]
            offset, (layers, _, count, positions) = rows.start - place.tokens.start, target.shape
            target[...] = widen(chunk)[:layers, :, offset : offset + count, :positions]

        def last_of(place: Place) -> bool:
            return place.tokens.stop <= place.positions.stop

        self._each(tokens, load)

    def _each(self, tokens: range, work: Callable[[Place], None]) -> None:
        """Do something with every chunk that holds weights of those tokens."""
        with ThreadPoolExecutor(_cores()) as pool:
            for _ in pool.map(work, self._places(tokens)):
                pass

    def _places(self, tokens: range) -> Iterator[Place]:
        """The chunks on and below the diagonal."""
        layers, _, end, _ = self.shape
        high, _, band, width = self.chunks.shape
        for group, row in product(range(-(-layers // high)), range(tokens.start // band, -(-tokens.stop // band))):
            rows = range(row * band, min(row * band + band, end))
            for column in range(-(-rows.stop // width)):
                yield Place(
                    numbers=(group, 0, row, column),
                    layers=slice(group * high, group * high + high),
                    tokens=rows,
                    positions=range(column * width, column * width + width),
                )

    def _file(self, place: Place) -> Path:
        return self._folder.joinpath("c", *map(str, place.numbers))


class _Codecs:
    """What is done to a chunk on its way to the disk and back: the codecs that the metadata names."""

    def __init__(self, dtype: np.dtype[Any], chunks: Chunks) -> None:
        import google_crc32c  # zarr needs both
        from numcodecs.blosc import BITSHUFFLE, Blosc

        self._dtype, self._shape = dtype, chunks.shape
        self._checksum = google_crc32c.value
        self._blosc = Blosc(cname=COMPRESSION["cname"], clevel=COMPRESSION["clevel"], shuffle=BITSHUFFLE)

    def encode(self, chunk: Float[np.ndarray, "layers heads tokens positions"], file: Path) -> None:
        """Put a chunk into its file."""
        packed = self._blosc.encode(np.ascontiguousarray(chunk))
        with file.open("wb") as out:
            out.write(packed)
            out.write(self._checksum(packed).to_bytes(CHECKSUM_BYTES, "little"))

    def decode(self, file: Path) -> Float[np.ndarray, "layers heads tokens positions"]:
        """The chunk in a file. Raises InputFileError for one that is not there or not as it was written."""
        try:
            content = file.read_bytes()
        except FileNotFoundError as error:
            raise InputFileError(f"{file} is missing, and with it weights of the trace; record it again") from error
        packed, checksum = content[:-CHECKSUM_BYTES], content[-CHECKSUM_BYTES:]
        if len(content) <= CHECKSUM_BYTES or self._checksum(packed).to_bytes(CHECKSUM_BYTES, "little") != checksum:
            raise InputFileError(
                f"{file} is damaged, cut short or altered: its checksum does not match; record it again"
            )
        weights = np.frombuffer(self._blosc.decode(packed), dtype=self._dtype)
        if weights.size != np.prod(self._shape):
            raise InputFileError(f"{file} holds {weights.size} weights, a chunk of this trace {np.prod(self._shape)}")
        return weights.reshape(self._shape)


def widen(given: Float[np.ndarray, "..."]) -> Float32[np.ndarray, "..."]:
    """The same weights in float32, exactly.

    NumPy converts half precision element by element; for numbers that are finite and not negative, moving the bits and
    scaling does the same at 20 times the speed.
    """
    if given.dtype != np.float16 or given.view(np.uint16).max(initial=0) >= 0x7C00:
        return given.astype(np.float32, copy=False)
    bits = given.view(np.uint16).astype(np.uint32)
    np.left_shift(bits, 13, out=bits)
    wide = bits.view(np.float32)
    return np.multiply(wide, np.float32(2.0**112), out=wide)


def require_zarr() -> Any:
    """The module. Raises MissingExtra when it is not installed."""
    try:
        import zarr
        import zarr.codecs
        import zarr.errors
    except ModuleNotFoundError as error:
        raise MissingExtra("zarr", "lab") from error
    return zarr


def _power_of_two(most: int) -> int:
    """The largest that is not above; 1 at least."""
    return 1 << (max(1, most).bit_length() - 1)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
