"""Which weights of a step are its largest, and whether all of them are weights, in NumPy.

Knows one step at a time. `kernels.find_heavy` gives the same faster, where numba is installed.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float32, Int32, Int64

from headwater.errors import InputFileError
from headwater.traces.result import HEAVY_HITTERS
from headwater.traces.trace import Chunk


def find_heavy(
    weights: Float32[np.ndarray, "rows steps positions"], first: int, heavy: Int32[np.ndarray, "rows steps heavy"]
) -> tuple[int, int]:
    """Fill in the positions of every step's largest weights, its own left out, ascending, and -1 past their end.

    Of equal weights the lowest positions count. Returns row and index of a step with a weight that is none, after which
    `heavy` means nothing; otherwise -1, -1.
    """
    heavy.fill(-1)
    for index in range(weights.shape[1]):
        step = first + index
        bad = ~are_weights(weights[:, index, : step + 1]).all(axis=1)
        if bad.any():
            return int(bad.argmax()), index
        chosen = _largest(weights[:, index, :step], HEAVY_HITTERS)
        heavy[:, index, : chosen.shape[1]] = chosen
    return -1, -1


def are_weights(values: Float32[np.ndarray, "*shape"]) -> Bool[np.ndarray, "*shape"]:
    """Whether each is finite and not negative."""
    return np.isfinite(values) & (values >= 0)


def not_a_weight(trace: str, chunk: Chunk, row: int, index: int) -> InputFileError:
    """The error for the first value that is no weight in that step."""
    step = chunk.first + index
    values = chunk.weights[row, index, : step + 1]
    position = int(np.argmin(are_weights(values)))
    return InputFileError(
        f"{trace}: the weight of position {position} is {values[position]} at row {row}, step {step}; attention "
        f"weights are finite and not negative"
    )


def _largest(weights: Float32[np.ndarray, "rows positions"], most: int) -> Int64[np.ndarray, "rows chosen"]:
    rows, count = weights.shape
    if count <= most:
        return np.tile(np.arange(count), (rows, 1))
    threshold = np.partition(weights, count - most, axis=1)[:, count - most, None]
    above, equal = weights > threshold, weights == threshold
    wanted = most - above.sum(axis=1, keepdims=True)
    chosen = above | (equal & (np.cumsum(equal, axis=1) <= wanted))
    return np.nonzero(chosen)[1].reshape(rows, most)
