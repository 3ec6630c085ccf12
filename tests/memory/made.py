"""Passages, and an embedder that knows words alone, for the tests of memory."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence

import numpy as np

from headwater.memory import Memory, Passage
from headwater.memory.embedder import unit

WORDS = ["boat", "river", "anna", "oslo", "train", "hotel", "booking", "number", "violin", "rain", "café", "日本", "42"]


class Hashed:
    """Vectors that depend on the words alone."""

    name, dim = "hashed", 32

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        out = np.zeros((len(texts), self.dim), dtype=np.float32)
        for row, text in enumerate(texts):
            for word in text.lower().split():
                seed = int.from_bytes(hashlib.sha256(word.encode()).digest()[:4], "little")
                out[row] += np.random.default_rng(seed).standard_normal(self.dim).astype(np.float32)
        return unit(out)


def said(number: int, text: str, conversation: str = "c") -> Passage:
    return Passage(key=f"{conversation}:{number}", conversation=conversation, number=number, text=text, when="then")


def talk(count: int, seed: int = 0, conversation: str = "c") -> list[Passage]:
    chance = random.Random(seed)
    return [said(n, " ".join(chance.choices(WORDS, k=chance.randrange(3, 9))), conversation) for n in range(1, count)]


def keys(memory: Memory, text: str, **options: object) -> list[str]:
    return [each.passage.key for each in memory.recall(text, **{"conversation": "c", "limit": 100, **options})]  # pyright: ignore[reportArgumentType]
