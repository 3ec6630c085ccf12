"""The compiled half of the replay: heavy hitters, and one row after the other under a scoring policy.

Knows arrays only, and needs numba. Does not know policies: `kernel_run` says what each comes down to. The results are
exactly those of the counterparts in NumPy, `heavy` and `rule_run`. Everything here lets go of the interpreter's lock,
so that threads can share the rows.

Two things make it fast. Weights are not negative, so the bits of a float, read as an integer, order as the float does,
and the processor compares integers many at a time. And loops count from 0 over slices: over values, or between bounds,
the compiler does not do many at a time.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from headwater.traces.prefetch import ask_for
from headwater.traces.result import HEAVY_HITTERS

compiled = njit(nogil=True, cache=True, error_model="numpy")

SUMS, VOTES, LATEST, POOLED, HASH = range(5)
"""What a slot is ranked by: h2o, scissorhands, tova, snapkv with pyramidkv, and random."""

INFINITE = np.uint32(0x7F800000)
MINUS_ZERO = np.uint32(0x80000000)
FEW = 8
"""How many more than the heavy hitters may be sorted out one by one."""
APART = 1 << 18
"""How far the bits of neighbours in rank are apart near the threshold, often: a thirtieth of an octave."""


class Rule(NamedTuple):
    """What a policy comes down to.

    An eviction is due above `budget` and leaves `target`; the first `sinks` and the last `recent` slots stay. `steps`
    are remembered and pooled over `reach` neighbours on either side; `seed` is for the hash.
    """

    score: int
    budget: int
    target: int
    sinks: int
    recent: int
    steps: int
    reach: int
    seed: np.uint64


class Held(NamedTuple):
    """What rows hold: `[rows]` counts, `[rows, slots]` positions and scores, `[rows, steps, slots]` last weights."""

    counts: np.ndarray
    positions: np.ndarray
    scores: np.ndarray
    rings: np.ndarray


class Figures(NamedTuple):
    """Where the results go, as in `Replay`."""

    mass: np.ndarray
    hits: np.ndarray
    evictions: np.ndarray
    left: np.ndarray


@compiled
def advance(rule, held, figures, weights, first, heavy):
    """All steps of a chunk for every row. Returns a step that ended above the budget, or 0."""
    shown = np.empty(held.positions.shape[1], dtype=np.float32)
    sums = np.empty(held.positions.shape[1])
    for row in range(len(weights)):
        positions, scores, rings = held.positions[row], held.scores[row], held.rings[row]
        mass, hits, left = figures.mass[row], figures.hits[row], figures.left[row]
        count = held.counts[row]
        for index in range(weights.shape[1]):
            step = first + index
            ask_for_next(weights, row, index, step + 2)
            paid = weights[row, index]
            mass[step - 1] = look(paid, positions[:count], shown[:count]) + np.float64(paid[step])
            hits[step - 1] = still_held(heavy[row, index], left)
            observe(rule, step, shown[:count], scores[:count], rings)
            positions[count], scores[count], rings[:, count] = step, 0, 0
            count += 1
            if count <= rule.budget:
                continue
            figures.evictions[row] += 1
            rank(rule, positions[:count], scores[:count], rings, sums[:count])
            while count > rule.target and count - rule.recent > rule.sinks:
                victim = rule.sinks + first_lowest(scores[rule.sinks : count - rule.recent])
                left[positions[victim]] = step
                close(positions[victim:count])
                close(scores[victim:count])
                for ring in range(len(rings)):
                    close(rings[ring, victim:count])
                count -= 1
            if count > rule.budget:
                return step
        held.counts[row] = count
    return 0


@compiled
def ask_for_next(weights, row, index, count):
    """Bring the first weights of the step after this one near while there is work to do on this one."""
    if index + 1 < weights.shape[1]:
        ask_for(weights[row, index + 1, :count])
    elif row + 1 < len(weights):
        ask_for(weights[row + 1, 0, :count])


@compiled
def look(paid, positions, shown):
    """The weights of what is held, and their sum in ascending position order."""
    total = 0.0
    for slot in range(len(positions)):
        weight = paid[positions[slot]]
        shown[slot] = weight
        total += np.float64(weight)
    return total


@compiled
def still_held(heavy, left):
    """How many of the heavy hitters have not left."""
    count = 0
    for item in range(len(heavy)):
        count += (heavy[item] >= 0) & (left[max(heavy[item], 0)] == len(left))
    return count


@compiled
def observe(rule, step, shown, scores, rings):
    """Apply one step's attention."""
    if rule.score == SUMS:
        for slot in range(len(shown)):
            scores[slot] += np.float64(shown[slot])
    elif rule.score == VOTES:
        share = 1.0 / len(shown)
        for slot in range(len(shown)):
            scores[slot] += np.float64(np.float64(shown[slot]) > share)
    elif rule.score == LATEST:
        for slot in range(len(shown)):
            scores[slot] = np.float64(shown[slot]) + 0.0  # no minus zero: its bits order below zero
    elif rule.score == POOLED:
        ring = rings[(step - 1) % len(rings)]
        for slot in range(len(shown)):
            ring[slot] = shown[slot]


@compiled
def rank(rule, positions, scores, rings, sums):
    """Scores that an eviction makes anew: the pooled sums of the last weights, or a hash."""
    if rule.score == POOLED:
        sums[:] = 0
        for entry in range(len(rings)):
            ring = rings[entry, : len(sums)]
            for slot in range(len(sums)):
                sums[slot] += np.float64(ring[slot])
        scores[:] = sums
        keys, pooled = sums.view(np.int64), scores.view(np.int64)
        for shift in range(1, min(rule.reach, len(sums) - 1) + 1):
            raise_to(pooled[shift:], keys[: len(keys) - shift])
            raise_to(pooled[: len(keys) - shift], keys[shift:])
    elif rule.score == HASH:
        key = mix(mix(rule.seed) + np.uint64(positions[-1]))
        for slot in range(len(scores)):
            scores[slot] = np.float64(mix(key + np.uint64(positions[slot])) >> np.uint64(11))


@compiled
def raise_to(values, least):
    """The larger of both, in place."""
    for slot in range(len(values)):
        values[slot] = max(values[slot], least[slot])


@compiled
def mix(z):
    """As `policies.uniform.mix`."""
    z = z + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@compiled
def first_lowest(scores):
    """The index of the lowest score, of equals the first."""
    keys = scores.view(np.int64)
    lowest = keys[0]
    for slot in range(len(keys)):
        lowest = min(lowest, keys[slot])
    slot = 0
    while keys[slot] != lowest:
        slot += 1
    return slot


@compiled
def close(values):
    """Drop the first value: the others move up by one."""
    for slot in range(len(values) - 1):
        values[slot] = values[slot + 1]


@compiled
def find_heavy(weights, first, heavy):
    """The positions of every step's largest weights, ascending, -1 past their end.

    Returns row and index of a step with a weight that is none, after which `heavy` means nothing; else -1, -1.
    """
    room = weights.shape[2] + 8
    marks, eights = np.empty(room, dtype=np.uint8), np.empty(room, dtype=np.int32)
    places, marked = np.empty(room, dtype=np.int32), np.empty(room, dtype=np.uint32)
    for row in range(len(weights)):
        guess = np.uint32(0)
        for index in range(weights.shape[1]):
            step = first + index
            ask_for_next(weights, row, index, step + 2)
            paid, wanted = weights[row, index, : step + 1].view(np.uint32), min(step, HEAVY_HITTERS)
            low = np.uint32(max(np.int64(guess) - 2 * APART, 0))
            top, count = mark(paid[:step], low, marks)
            if max(top, paid[step]) >= INFINITE:
                paid = without_minus_zero(paid)
                top, count = mark(paid[:step], low, marks)
                if max(top, paid[step]) >= INFINITE:
                    return row, index
            keys = paid[:step]
            if not wanted <= count <= wanted + FEW:
                low = narrow(keys, wanted, np.int64(top) + 1, np.int64(low) + (count - wanted) * APART)
                mark(keys, low, marks)
            found = collect(marks, step, eights, places)
            for item in range(found):
                marked[item] = keys[places[item]]
            guess = threshold(marked[:found], wanted)
            emit(places[:found], marked[:found], guess, wanted, heavy[row, index])
    return -1, -1


@compiled
def mark(keys, low, marks):
    """Mark the keys that reach `low`; returns the largest key, or 0, and how many are marked."""
    top, count = np.uint32(0), np.uint32(0)
    for place in range(len(keys)):
        reaches = keys[place] >= low
        top = max(top, keys[place])
        marks[place] = reaches
        count = np.uint32(count + np.uint32(reaches))
    return top, np.int64(count)


@compiled
def without_minus_zero(keys):
    """The same weights with every zero positive, so that their bits order as they do."""
    mended = keys.copy()
    for place in range(len(mended)):
        if mended[place] == MINUS_ZERO:
            mended[place] = 0
    return mended


@compiled
def narrow(keys, wanted, high, probe):
    """A bound that at least `wanted` keys reach, and not many more unless they are equal; no key reaches `high`.

    Moves on from the probe by what it missed, further each time, and never past the middle of what is left.
    """
    low, apart = np.int64(0), APART
    while high - low > 1:
        if not low < probe < high:
            probe = (low + high) // 2
        missed = count_from(keys, np.uint32(probe)) - wanted
        if missed >= 0:
            low = probe
            if missed <= FEW:
                break
            probe = min(low + missed * apart, (low + high) // 2)
        else:
            high = probe
            probe = max(high + (missed - FEW // 2) * apart, (low + high) // 2)
        apart *= 2
    return np.uint32(low)


@compiled
def count_from(keys, low):
    """How many keys reach `low`."""
    count = np.uint32(0)
    for place in range(len(keys)):
        count = np.uint32(count + np.uint32(keys[place] >= low))
    return np.int64(count)


@compiled
def collect(marks, count, eights, places):
    """The places that are marked among the first `count`, ascending; returns how many.

    Places are looked at eight at a time, and one at a time only where one of the eight is marked. What might be is
    written down, and counted only if it is: processors guess wrong at branches like these.
    """
    whole = (count + 7) // 8
    marks[count : 8 * whole] = 0
    words, chosen, found = marks[: 8 * whole].view(np.uint64), np.uint64(0), np.uint64(0)
    for eight in range(whole):
        eights[chosen] = eight
        chosen += np.uint64(words[eight] != 0)
    for item in range(np.int64(chosen)):
        start = 8 * np.int64(eights[item])
        for offset in range(8):
            places[found] = start + offset
            found += np.uint64(marks[start + offset])
    return np.int64(found)


@compiled
def threshold(keys, wanted):
    """The `wanted` largest key, of not many more."""
    lowest = smallest_from(keys, np.uint32(0))
    while count_from(keys, np.uint32(lowest + 1)) >= wanted:
        lowest = smallest_from(keys, np.uint32(lowest + 1))
    return lowest


@compiled
def smallest_from(keys, low):
    """The smallest key that reaches `low`."""
    smallest = INFINITE
    for place in range(len(keys)):
        smallest = min(smallest, keys[place] if keys[place] >= low else INFINITE)
    return smallest


@compiled
def emit(places, keys, least, wanted, heavy):
    """Every place above the threshold, and of those that equal it as many of the lowest as are wanted still."""
    equals = wanted - count_from(keys, np.uint32(least + 1))
    filled, met = np.uint64(0), 0
    for item in range(len(keys)):
        places[filled] = places[item]
        filled += np.uint64((keys[item] > least) | ((keys[item] == least) & (met < equals)))
        met += keys[item] == least
    for item in range(wanted):
        heavy[item] = places[item]
    heavy[wanted:] = -1
