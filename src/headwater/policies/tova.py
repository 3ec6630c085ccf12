"""The policy that keeps what the latest step looked at.

M. Oren, M. Hassid, N. Yarden, Y. Adi, R. Schwartz, "Transformers are Multi-State RNNs", EMNLP 2024, arXiv 2401.06104.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Bool, Float64

from headwater.policies.base import Slots
from headwater.policies.protection import WithSinks
from headwater.policies.signals import UNOBSERVED, Latest


@dataclass(frozen=True, slots=True, kw_only=True)
class Tova(WithSinks[np.ndarray]):
    """Keeps the highest weights of the latest step that showed any.

    There is no recent window: what was never observed is no candidate, so the newest position stays until the next
    step with attention, and without attention nothing can go.
    """

    name: ClassVar[str] = "tova"
    summary: ClassVar[str] = "the highest weights of the latest step"
    source: ClassVar[str] = "Oren et al., EMNLP 2024, arXiv 2401.06104"
    reports: ClassVar[frozenset[str]] = frozenset({"last_attention_of"})

    @property
    def signal(self) -> Latest:
        return Latest()

    def protected(self, slots: Slots[np.ndarray]) -> Bool[np.ndarray, "rows slots"]:
        return (slots.positions < self.sinks) | (slots.state == UNOBSERVED)

    def scores(self, slots: Slots[np.ndarray]) -> Float64[np.ndarray, "rows slots"]:
        return slots.state

    def last_attention_of(self, slots: Slots[np.ndarray], position: int) -> Float64[np.ndarray, " rows"]:
        """The last weight of a position in each row; -1 where it was never observed or is not held."""
        return slots.value_at(position, slots.state)
