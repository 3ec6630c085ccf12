"""What the drop-in cache refuses, by name and before anything runs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from headwater.cache.adapter import WindowCache
from headwater.errors import BudgetError, CacheStateError, UnsupportedCall, UnsupportedModel, UsageError
from tests import tiny


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"budget": 4}, "budget must be at least pins"),
        ({"budget": -3, "sinks": 0}, "at least 1 token, got -3"),
        ({"budget": 20, "sinks": -1}, "sinks must be an integer of at least 0"),
        ({"budget": 20, "pinned": 20}, "budget must be at least pins"),
        ({"budget": 20, "block": 17}, "block must be between 1 and the window of 16"),
        ({"budget": 20, "block": 0}, "block must be between 1"),
        ({"budget": 2.5}, "budget must be an integer"),
        ({"budget": True, "sinks": 0}, "budget must be an integer"),
        ({"budget": 512}, "trained length is 512; lower the budget to 511"),
        ({"budget": 20, "reindex": "yes"}, "'auto' or 'none'"),
    ],
)
def test_numbers_that_do_not_fit(model: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        WindowCache(model, **options)


def test_a_window_that_does_not_fit_below_the_rotary_limit() -> None:
    with pytest.raises(BudgetError, match="frequencies change at position 512"):
        WindowCache(tiny.build("dynamic"), 300)
    model = tiny.build("dynamic")
    with torch.inference_mode(), pytest.raises(UnsupportedCall, match="prefill_chunk_size"):
        model(input_ids=tiny.tokens(600), cache=WindowCache(model, 100))


def test_not_a_model() -> None:
    with pytest.raises(UnsupportedModel, match="needs a transformers model, got int"):
        WindowCache(3, 20)  # type: ignore[arg-type]


def test_padded_batches(model: Any) -> None:
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, :3] = 0
    cache = WindowCache(model, 20)
    with pytest.raises(UnsupportedCall, match="padded batches"):
        tiny.generate(model, cache, tiny.tokens(12, rows=2), 5, attention_mask=mask)
    assert cache.seen == 0


def test_assisted_and_prompt_lookup_decoding(model: Any) -> None:
    for options in ({"assistant_model": tiny.build("llama", seed=1)}, {"prompt_lookup_num_tokens": 3}):
        cache = WindowCache(model, 20)
        with pytest.raises(UnsupportedCall, match="assisted and prompt-lookup"):
            tiny.generate(model, cache, tiny.tokens(12), 5, **options)
        assert cache.seen == 0


@pytest.mark.filterwarnings("ignore")
def test_continuous_batching_is_refused(model: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """It runs in a thread of its own, which reports the refusal and ends the request without a single new token."""
    cache = WindowCache(model, 20)
    out = tiny.generate(model, cache, tiny.tokens(12), 5, cache_implementation="paged")
    assert out.shape[-1] == 12
    assert "continuous batching brings its own paged cache" in capfd.readouterr().err
    assert cache.seen == 0


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({"attention_mask": torch.ones(1, 5)}, "covers 5 tokens, but the cache has seen 12 and 5 are new"),
        ({"attention_mask": torch.ones(1, 1, 5, 17)}, "2-D attention_mask"),
        ({"position_ids": torch.arange(5)[None]}, "run from 0 to 4, but the cache has seen 12"),
        ({"position_ids": torch.arange(12, 22, 2)[None]}, "run from 12 to 20"),
    ],
)
def test_calls_that_contradict_what_was_seen(model: Any, call: dict[str, Any], words: str) -> None:
    cache = WindowCache(model, 20)
    with torch.inference_mode():
        model(input_ids=tiny.tokens(12), cache=cache)
        with pytest.raises((CacheStateError, UnsupportedCall), match=words):
            model(input_ids=tiny.tokens(5), cache=cache, **call)
    assert cache.seen == 12


@pytest.mark.parametrize("length", [5, 12, 19])
def test_new_ids_only_under_generate(model: Any, length: int) -> None:
    """transformers#36151: the second turn without the history; silently wrong with the stock cache."""
    cache = WindowCache(model, 64)
    tiny.generate(model, cache, tiny.tokens(12), 8)
    with pytest.raises((CacheStateError, UnsupportedCall, ValueError, IndexError)):
        tiny.generate(model, cache, tiny.tokens(length, seed=4), 8)


def test_gradients_another_batch_another_dtype_another_model_and_copies(model: Any) -> None:
    cache = WindowCache(model, 20)
    with pytest.raises(UnsupportedCall, match="inference"):
        model(input_ids=tiny.tokens(5), cache=cache)
    with torch.inference_mode():
        model(input_ids=tiny.tokens(5), cache=cache)
        with pytest.raises(CacheStateError, match="batch of 1 rows and was given 2"):
            model(input_ids=tiny.tokens(5, rows=2), cache=cache)
        with pytest.raises(CacheStateError, match="outside of a forward pass of the model it was made for"):
            tiny.build("llama", seed=3)(input_ids=tiny.tokens(5), cache=WindowCache(model, 20))
        model.to(torch.bfloat16)
        with pytest.raises(CacheStateError, match="make a new cache after moving the model"):
            model(input_ids=tiny.tokens(5), cache=cache)
    with pytest.raises(UnsupportedCall, match="cannot be copied"):
        copy.deepcopy(cache)


def test_a_hybrid_model_whose_forward_pass_failed_half_way_must_be_reset() -> None:
    model = tiny.build("gemma3")
    cache = WindowCache(model, 20)
    with torch.inference_mode():
        model(input_ids=tiny.tokens(8), cache=cache)
        whole = model.model.layers[3].mlp.forward
        model.model.layers[3].mlp.forward = lambda *_: (_ for _ in ()).throw(RuntimeError("boom"))
        with pytest.raises(RuntimeError, match="boom"):
            model(input_ids=tiny.tokens(3), cache=cache)
        model.model.layers[3].mlp.forward = whole
        with pytest.raises(CacheStateError, match="failed half way"):
            model(input_ids=tiny.tokens(3), cache=cache)
        cache.reset()
        model(input_ids=tiny.tokens(3), cache=cache)
    assert cache.seen == 3
