"""The cheapest way to let one position go at each step: an assignment problem, solved step by step. Compiled.

Knows costs as an array, and needs numba. Does not know attention.

Every step takes one position for good. A new step takes the position that is cheapest for all steps so far together:
along a shortest path, on which earlier steps may exchange theirs. That is the method of successive shortest paths with
prices (H. W. Kuhn, Naval Research Logistics Quarterly 2, 1955; R. Jonker, A. Volgenant, Computing 38, 1987). Positions
join while steps pass, so a path only meets few of them, and nothing is looked at that costs more than a position
already found.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64, Int64

from headwater.traces.kernels import compiled

FREE = -1


@compiled
def assign(
    costs: Float64[np.ndarray, "steps positions"], spare: int
) -> tuple[Int64[np.ndarray, " steps"], Float64[np.ndarray, " positions"]]:
    """The position that each step takes, all different, for the least sum of `costs[step, position]`; and its proof.

    Step `i` takes one of the positions `0..spare + i`; costs beyond those are not read. Costs are finite. The proof is
    a price of at most 0 for each position, 0 where nothing took it: no assignment costs less than the prices added up,
    plus for each step the least `cost - price` among its positions. Up to rounding the sum found equals that.
    """
    steps, positions = costs.shape
    taker = np.full(positions, FREE)
    taken = np.full(steps, FREE)
    price, dear = np.zeros(positions), np.zeros(steps)
    distance, before = np.empty(positions), np.empty(positions, dtype=np.int64)
    reached, settled = np.empty(positions, dtype=np.int64), np.empty(positions, dtype=np.int64)
    for new in range(steps):
        distance[: spare + new + 1] = np.inf
        step, so_far, nearest, found = new, 0.0, np.inf, FREE
        waiting = done = 0
        while True:
            for position in range(spare + step + 1):
                # Never negative but by rounding, and then paths could run in circles.
                along = so_far + max(0.0, costs[step, position] - price[position] - dear[step])
                if along < nearest and along < distance[position]:
                    if taker[position] == FREE:
                        nearest, found = along, position
                    elif distance[position] == np.inf:
                        reached[waiting] = position
                        waiting += 1
                    distance[position], before[position] = along, step
            so_far, place = nearest, FREE
            for index in range(waiting):
                if distance[reached[index]] < so_far:
                    so_far, place = distance[reached[index]], index
            if place == FREE:
                break
            position = reached[place]
            waiting -= 1
            reached[place] = reached[waiting]
            settled[done] = position
            done += 1
            step = taker[position]
        dear[new] = nearest
        for position in settled[:done]:
            price[position] -= nearest - distance[position]
            dear[taker[position]] += nearest - distance[position]
        while found != FREE:
            step = before[found]
            taker[found] = step
            found, taken[step] = taken[step], found
    return taken, price
