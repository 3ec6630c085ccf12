"""Rows of several torch streams in one forward pass, over every family; and models whose rows cannot share one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from headwater.cache import together
from headwater.engines.base import Stream
from headwater.engines.torch_streams import WindowStream
from headwater.engines.transformers import TransformersEngine
from headwater.policies.window import Window
from tests import tiny

WINDOW = Window(budget=24, pins=4, block=3)
VARIANTS = [(name, how) for name, family in tiny.FAMILIES.items() if not family.refused for how in family.attention]


def engine_of(model: Any) -> TransformersEngine:
    return TransformersEngine(model, SimpleNamespace(chat_template=None, eos_token_id=2), name="tiny")


class Passes:
    """How many forward passes a model made, and of how many rows."""

    def __init__(self, model: Any) -> None:
        self.rows: list[int] = []
        model.get_input_embeddings().register_forward_hook(lambda _, args, out: self.rows.append(args[0].shape[0]))


def talked(engine: TransformersEngine, lengths: tuple[int, ...], window: Window | None = WINDOW) -> list[Stream]:
    streams: list[Stream] = []
    for number, length in enumerate(lengths):
        stream = engine.open(window)
        stream.feed(tiny.tokens(length, seed=number)[0].tolist())
        streams.append(stream)
    return streams


def check(engine: TransformersEngine, rows: list[Stream], twins: list[Stream], steps: int, relative: float) -> None:
    text = tiny.tokens(steps * len(rows), seed=9)[0].tolist()
    for step in range(steps):
        tokens = text[step * len(rows) : (step + 1) * len(rows)]
        alone = [twin.feed([token]) for twin, token in zip(twins, tokens, strict=True)]
        for came, logits in zip(engine.feed_together(rows, tokens), alone, strict=True):
            assert isinstance(came, np.ndarray), came
            np.testing.assert_allclose(came, logits, rtol=0, atol=relative * np.abs(logits).max())
        assert [row.kept.tolist() for row in rows] == [twin.kept.tolist() for twin in twins]


@pytest.mark.parametrize(("name", "attention"), VARIANTS)
def test_rows_of_every_family_are_what_they_are_alone(name: str, attention: str):
    """Across evictions, a rebase where the family has short frames, and layers that slide by themselves."""
    model = tiny.build(name, attention=attention)
    engine, passes = engine_of(model), Passes(model)
    assert engine.apart is None
    rows, twins = talked(engine, (3, 24, 70)), talked(engine, (3, 24, 70))
    passes.rows.clear()
    check(engine, rows, twins, 30, 1e-4)
    assert passes.rows == [1, 1, 1, 3] * 30
    assert model.config._attn_implementation == attention


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_rows_that_keep_everything(name: str):
    engine = engine_of(tiny.build(name))
    check(engine, talked(engine, (3, 24, 70), None), talked(engine, (3, 24, 70), None), 10, 1e-4)


def test_learned_positions_are_each_rows_own():
    engine = engine_of(tiny.build("gpt2"))
    assert engine.apart is None
    check(engine, talked(engine, (3, 24, 70), None), talked(engine, (3, 24, 70), None), 5, 1e-4)


def test_half_precision():
    engine = engine_of(tiny.build("llama", dtype=torch.bfloat16))
    assert engine.apart is None
    check(engine, talked(engine, (3, 24, 70)), talked(engine, (3, 24, 70)), 20, 0.05)


def test_a_row_that_could_change_the_frequencies_of_others_goes_alone():
    model = tiny.build("dynamic")
    engine = engine_of(model)
    rows = [*talked(engine, (5, 30)), *talked(engine, (40,), None)]
    assert engine.apart is None
    passes = Passes(model)
    assert all(isinstance(each, np.ndarray) for each in engine.feed_together(rows, [3, 4, 5]))
    assert sorted(passes.rows) == [1, 2]


def test_a_row_that_fails_on_the_way_leaves_the_others_alone(monkeypatch: pytest.MonkeyPatch):
    engine = engine_of(tiny.build("llama"))
    rows, twins = talked(engine, (3, 24, 70)), talked(engine, (3, 24, 70))
    assert isinstance(rows[1], WindowStream)
    ring = rows[1]._open().ring
    update, layers = ring.update, list[int]()

    def failing(layer: int, *given: Any) -> Any:
        layers.append(layer)
        if layer == 2:
            raise MemoryError("no memory for this row")
        return update(layer, *given)

    with monkeypatch.context() as patch:
        patch.setattr(ring, "update", failing)
        came = engine.feed_together(rows, [5, 6, 7])
    assert isinstance(came[1], MemoryError)
    assert layers == [0, 1, 2], "a row that has failed is not asked again"
    for index in (0, 2):
        logits = came[index]
        assert isinstance(logits, np.ndarray)
        np.testing.assert_allclose(logits, twins[index].feed([5 + index]), rtol=0, atol=1e-3)
    assert rows[1].seen == twins[1].seen
    check(engine, rows, twins, 5, 1e-4)


def test_a_forward_pass_that_fails_leaves_every_row_as_it_was():
    model = tiny.build("llama")
    engine = engine_of(model)
    rows, twins = talked(engine, (3, 24, 70)), talked(engine, (3, 24, 70))
    assert engine.apart is None

    def fail(*_: object) -> None:
        raise MemoryError("no memory for this step")

    handle = model.model.layers[2].mlp.register_forward_pre_hook(fail)
    came = engine.feed_together(rows, [5, 6, 7])
    handle.remove()
    assert [str(each) for each in came] == ["no memory for this step"] * 3
    assert model.config._attn_implementation == "sdpa"
    check(engine, rows, twins, 5, 1e-4)


def test_a_model_whose_rows_get_mixed_up_steps_them_alone(monkeypatch: pytest.MonkeyPatch):
    """The proof is run on the model itself: here attention that looks at the neighbour's keys."""
    attend, first = together.attend_one, list[Any]()

    def mixed(query: Any, keys: Any, values: Any, **how: Any) -> Any:
        first[:] = first or [keys, values]
        return attend(query, *first, **how)

    model = tiny.build("llama")
    engine, passes = engine_of(model), Passes(model)
    monkeypatch.setattr(together, "attend_one", mixed)
    assert "row 0 of 3 that were computed together was off by" in str(engine.apart)
    rows, twins = talked(engine, (3, 24, 70)), talked(engine, (3, 24, 70))
    passes.rows.clear()
    check(engine, rows, twins, 3, 1e-4)
    assert set(passes.rows) == {1}


def test_a_model_that_cannot_says_why():
    """The distance bias of bloom comes from a mask, which knows of one length only."""
    engine = engine_of(tiny.build("bloom"))
    assert engine.apart is not None
    check(engine, talked(engine, (3, 24, 70), None), talked(engine, (3, 24, 70), None), 3, 1e-4)
