"""The array on disk: weights as `[layers, heads, tokens, positions]` in Zarr v3, in compressed and checksummed chunks.

The only file that knows zarr, which is imported when an array is made or opened. Knows which chunks hold a part of the
lower triangle. Does not know what the numbers mean, except that nothing is ever written above the diagonal: a chunk
that lies there whole has no file, and one that should have a file and has none is an error, not zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from headwater.errors import InputFileError, MissingExtra
from headwater.traces.trace import CHUNK_BYTES

METADATA = "zarr.json"
FILE_BYTES = 2 << 20
"""About how large a chunk is before it is compressed."""
NARROWEST = 512
"""Positions in a chunk, at least."""
HIGHEST = 64
"""Tokens in a chunk, at most: what a recording can lose when it is killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """The shape of a chunk. `positions` is a multiple of `tokens`, so that a band of tokens ends at one column."""

    layers: int
    heads: int
    tokens: int
    positions: int

    @classmethod
    def fitting(cls, *, layers: int, heads: int, tokens: int, itemsize: int) -> Chunks:
        """Bands of as many tokens as a reader of `CHUNK_BYTES` takes at once, so that none is decoded twice; columns of
        a quarter of the positions or more; and as many layers as make a file of about `FILE_BYTES`."""
        positions = max(NARROWEST, _power_of_two(tokens // 4))
        step = layers * heads * tokens * 4
        band = _power_of_two(min(HIGHEST, CHUNK_BYTES // step, FILE_BYTES // (heads * positions * itemsize)))
        together = max(1, FILE_BYTES // (heads * band * positions * itemsize))
        groups = -(-layers // together)
        return cls(layers=-(-layers // groups), heads=heads, tokens=band, positions=positions)


def _power_of_two(most: int) -> int:
    """The largest that is not above; 1 at least."""
    return 1 << (max(1, most).bit_length() - 1)


class Triangle:
    """An array of which the lower triangle is written, band by band."""

    def __init__(self, array: Any, folder: Path) -> None:
        self._array, self._folder = array, folder
        layers, heads, tokens, positions = array.chunks
        self.chunks = Chunks(layers=layers, heads=heads, tokens=tokens, positions=positions)
        self.shape: tuple[int, int, int, int] = tuple(array.shape)
        self.dtype: np.dtype[Any] = array.dtype

    @staticmethod
    def fitting(shape: tuple[int, int, int, int], dtype: str) -> Chunks:
        """The chunks that a new array gets."""
        layers, heads, tokens, _ = shape
        return Chunks.fitting(layers=layers, heads=heads, tokens=tokens, itemsize=np.dtype(dtype).itemsize)

    @classmethod
    def create(
        cls, folder: Path, shape: tuple[int, int, int, int], dtype: str, attributes: Mapping[str, Any]
    ) -> Triangle:
        """A new array in a folder that is empty or not there."""
        zarr, chunks = require_zarr(), cls.fitting(shape, dtype)
        blosc = zarr.codecs.BloscCodec(cname="lz4", clevel=5, shuffle="bitshuffle", typesize=np.dtype(dtype).itemsize)
        array = zarr.create_array(
            store=str(folder),
            shape=shape,
            dtype=dtype,
            chunks=(chunks.layers, chunks.heads, chunks.tokens, chunks.positions),
            compressors=[blosc, zarr.codecs.Crc32cCodec()],  # the checksum is of what lies in the file
            fill_value=0,
            dimension_names=("layer", "head", "token", "position"),
            attributes=dict(attributes),
            config={"write_empty_chunks": True},
        )
        return cls(array, folder)

    @classmethod
    def open(cls, folder: Path, *, write: bool = False) -> Triangle:
        """The array in a folder that has one. Raises InputFileError when zarr cannot make sense of it."""
        zarr = require_zarr()
        try:
            array = zarr.open_array(
                store=str(folder), mode="r+" if write else "r", zarr_format=3, config={"write_empty_chunks": True}
            )
        except (ValueError, KeyError, TypeError, zarr.errors.BaseZarrError) as error:
            raise InputFileError(f"{folder / METADATA} does not describe a Zarr array: {error}") from error
        if array.ndim != 4:
            raise InputFileError(f"{folder / METADATA} describes an array of {array.ndim} dimensions; a trace has 4")
        return cls(array, folder)

    @property
    def attributes(self) -> dict[str, Any]:
        """What the array says of itself."""
        return dict(self._array.attrs)

    def set(self, name: str, value: int) -> None:
        """Change one attribute; whoever reads meanwhile sees the old or the new one."""
        self._array.attrs[name] = value

    def write(self, first: int, weights: Float[np.ndarray, "layers heads tokens positions"]) -> None:
        """Whole bands of tokens, or the last ones, from `first` on; `positions` ends with the last of the tokens."""
        for rows, edge in self._strips(first, first + weights.shape[2]):
            strip = weights[:, :, rows.start - first : rows.stop - first, :edge]
            given, width = strip.shape[3], self.chunks.positions
            whole = given // width * width if given < edge else edge
            if whole:
                self._array[:, :, rows.start : rows.stop, :whole] = strip[..., :whole]
            if whole < edge:  # a chunk is written whole, and the positions of its right part are still to come
                for some in self.layer_groups():
                    last = np.zeros((*strip[some].shape[:3], edge - whole), dtype=self.dtype)
                    last[..., : given - whole] = strip[some, ..., whole:]
                    self._array[some, :, rows.start : rows.stop, whole:edge] = last

    def layer_groups(self) -> Iterator[slice]:
        """The layers that lie together in a file."""
        for low in range(0, self.shape[0], self.chunks.layers):
            yield slice(low, min(low + self.chunks.layers, self.shape[0]))

    def read(
        self, layers: slice, tokens: range
    ) -> Iterator[tuple[range, Float[np.ndarray, "layers heads tokens positions"]]]:
        """The weights of consecutive tokens in those layers, in parts, each with the tokens that are in it.

        Raises InputFileError for a chunk whose file is missing, cut short or altered, naming the file.
        """
        for rows, edge in self._strips(tokens.start, tokens.stop):
            region = (layers, slice(None), slice(rows.start, rows.stop), slice(0, min(rows.stop, edge)))
            for file in self._files(layers, rows):
                if not file.is_file():
                    raise InputFileError(
                        f"{file} is missing: weights of tokens {rows.start} to {rows.stop - 1} are lost"
                    )
            try:
                part = self._array[region]
            except (ValueError, RuntimeError) as error:
                raise self._damage(layers, rows) or error from error
            yield rows, part

    def _strips(self, start: int, stop: int) -> Iterator[tuple[range, int]]:
        """Those tokens, cut where their weights begin to need one more column of chunks; with that column's end."""
        width = self.chunks.positions
        while start < stop:
            edge = start // width * width + width
            yield range(start, min(stop, edge)), min(edge, self.shape[3])
            start = min(stop, edge)

    def _coordinates(self, layers: slice, rows: range) -> Iterator[tuple[int, int, int, int]]:
        chunks, (start, stop, _) = self.chunks, layers.indices(self.shape[0])
        return product(
            range(start // chunks.layers, -(-stop // chunks.layers)),
            range(1),
            range(rows.start // chunks.tokens, -(-rows.stop // chunks.tokens)),
            range(-(-rows.stop // chunks.positions)),
        )

    def _files(self, layers: slice, rows: range) -> Iterator[Path]:
        for coordinates in self._coordinates(layers, rows):
            yield self._file(coordinates)

    def _file(self, coordinates: tuple[int, ...]) -> Path:
        return self._folder.joinpath("c", *map(str, coordinates))

    def _damage(self, layers: slice, rows: range) -> InputFileError | None:
        """What is wrong with the first chunk there that cannot be decoded."""
        for coordinates in self._coordinates(layers, rows):
            try:
                self._array.get_block_selection(coordinates)
            except (ValueError, RuntimeError) as error:
                return InputFileError(f"{self._file(coordinates)} is damaged, cut short or altered: {error}")
        return None


def require_zarr() -> Any:
    """The module. Raises MissingExtra when it is not installed."""
    try:
        import zarr
        import zarr.codecs
        import zarr.errors
    except ModuleNotFoundError as error:
        raise MissingExtra("zarr", "lab") from error
    return zarr
