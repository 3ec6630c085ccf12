"""What the drop-in cache refuses, under a window and under policies that look at attention: by name, and before
anything runs where that can be."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from headwater.cache.adapter import WindowCache
from headwater.cache.policy_cache import PolicyCache, attach
from headwater.errors import BudgetError, CacheStateError, UnsupportedCall, UnsupportedModel, UsageError
from headwater.policies import H2O, PyramidKV, SnapKV
from tests import tiny

BOTH = pytest.mark.parametrize("policy", ["streaming-llm", "tova"])
"""A cache of every kind: a window, and what a policy picks in every head."""


@contextmanager
def shown(model: Any) -> Iterator[None]:
    """As a policy needs it; a window goes on in it as it is."""
    with torch.inference_mode(), attach(model):
        yield


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


@BOTH
@pytest.mark.parametrize("hidden", [3, 12])
def test_padded_batches_and_rows_that_are_nothing_else(model: Any, policy: str, hidden: int) -> None:
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, :hidden] = 0
    cache = WindowCache(model, 20, policy=policy)
    with pytest.raises(UnsupportedCall, match="padded batches"), shown(model):
        tiny.generate(model, cache, tiny.tokens(12, rows=2), 5, attention_mask=mask)
    assert cache.seen == 0


@BOTH
@pytest.mark.parametrize(
    ("rows", "tokens", "words"), [(0, 5, "the batch has no rows"), (0, 0, "no rows"), (2, 0, "no new tokens")]
)
def test_batches_without_rows_and_rows_without_tokens(
    model: Any, policy: str, rows: int, tokens: int, words: str
) -> None:
    cache = WindowCache(model, 20, policy=policy)
    with pytest.raises((UnsupportedCall, CacheStateError), match=words), shown(model):
        model(input_ids=torch.zeros(rows, tokens, dtype=torch.long), cache=cache)
    assert cache.seen == cache.nbytes == 0
    with shown(model):
        model(input_ids=tiny.tokens(5), cache=cache)
    assert cache.seen == 5


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
@BOTH
def test_calls_that_contradict_what_was_seen(model: Any, call: dict[str, Any], words: str, policy: str) -> None:
    cache = WindowCache(model, 20, policy=policy)
    with shown(model):
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


# A model that changes, or is another one, under a cache in use.


@BOTH
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_another_model_is_refused_and_the_conversation_goes_on(family: str, policy: str) -> None:
    """Of a model with sliding layers the first took the other one's tokens in before the refusal. Under a policy the
    other model was given no past at all, without a word."""
    model, other = tiny.build(family), tiny.build(family, seed=3)
    cache, plain = WindowCache(model, 20, policy=policy), WindowCache(model, 20, policy=policy)
    tokens = tiny.tokens(30)
    with shown(model), shown(other):
        for each in (cache, plain):
            model(input_ids=tokens, cache=each)
        with pytest.raises(CacheStateError, match="outside of a forward pass of the model it was made for"):
            other(input_ids=tiny.tokens(5), cache=cache)
        assert cache.seen == 30
        ours, theirs = (model(input_ids=tiny.tokens(5, seed=2), cache=each).logits for each in (cache, plain))
    assert torch.equal(ours, theirs)


@BOTH
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_another_number_of_rows_is_refused_and_the_conversation_goes_on(family: str, policy: str) -> None:
    model = tiny.build(family)
    cache, plain = WindowCache(model, 20, policy=policy), WindowCache(model, 20, policy=policy)
    with shown(model):
        for each in (cache, plain):
            model(input_ids=tiny.tokens(30), cache=each)
        for rows in (2, 3):
            with pytest.raises(CacheStateError, match=f"batch of 1 rows and was given {rows}"):
                model(input_ids=tiny.tokens(4, rows=rows), cache=cache)
        ours, theirs = (model(input_ids=tiny.tokens(5, seed=2), cache=each).logits for each in (cache, plain))
    assert torch.equal(ours, theirs)


@BOTH
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_model_that_was_moved_is_refused_and_taken_when_it_is_back(family: str, policy: str) -> None:
    """Sliding layers of a model's own would have put keys of two dtypes side by side."""
    model = tiny.build(family)
    cache, plain = WindowCache(model, 20, policy=policy), WindowCache(model, 20, policy=policy)
    with shown(model):
        for each in (cache, plain):
            model(input_ids=tiny.tokens(30), cache=each)
        model.double()
        with pytest.raises(CacheStateError, match=r"float32 on cpu.*float64 on cpu; make a new cache after moving"):
            model(input_ids=tiny.tokens(4), cache=cache)
        model.float()
        ours, theirs = (model(input_ids=tiny.tokens(5, seed=2), cache=each).logits for each in (cache, plain))
        assert torch.equal(ours, theirs)
        model.to("meta")
        with pytest.raises(CacheStateError, match=r"float32 on cpu.*float32 on meta; make a new cache after moving"):
            model(input_ids=tiny.tokens(4).to("meta"), cache=cache)
    assert cache.seen == 35


@BOTH
def test_another_attention_in_the_middle_goes_on_or_is_refused(model: Any, policy: str) -> None:
    """Between blocks of `attach` the model is its user's; inside one a policy must be shown the attention."""
    cache, plain = WindowCache(model, 20, policy=policy), WindowCache(model, 20, policy=policy)
    with shown(model):
        for each in (cache, plain):
            model(input_ids=tiny.tokens(30), cache=each)
        expected = model(input_ids=tiny.tokens(5, seed=2), cache=plain).logits
    model.set_attn_implementation("eager")
    with shown(model):
        logits = model(input_ids=tiny.tokens(5, seed=2), cache=cache).logits
        torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-4)
        model.set_attn_implementation("sdpa")
        if policy == "tova":
            with pytest.raises(UnsupportedCall, match=r"tova looks at attention, which the model does not show"):
                model(input_ids=tiny.tokens(1), cache=cache)
            assert cache.seen == 35
        else:
            model(input_ids=tiny.tokens(1), cache=cache)
    assert model.config._attn_implementation == "eager", "attach leaves what it found"
    with shown(model):
        model(input_ids=tiny.tokens(1), cache=cache)


def test_attention_that_shows_nothing_and_what_is_no_model_cannot_be_attached(model: Any) -> None:
    with pytest.raises(UnsupportedModel, match="needs a transformers model, got int"), attach(3):  # type: ignore[arg-type]
        pass
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UnsupportedCall, match=r"'flash_attention_2', which shows no weights.*'sdpa'"), attach(model):
        pass
    assert model.config._attn_implementation == "flash_attention_2"


def test_layers_that_show_nothing_are_refused_and_other_caches_go_on(model: Any) -> None:
    """After the refusal the cache was still taken for the one under way, and attended to by whoever came next."""
    expected = tiny.by_hand(model, None, tiny.tokens(9), 1)
    cache = PolicyCache(model, H2O(budget=20, recent_window=4))
    with shown(model):
        whole = model.model.layers[2].self_attn.forward
        model.model.layers[2].self_attn.forward = lambda *_, hidden_states, **__: (hidden_states, None)
        with pytest.raises(UnsupportedModel, match=r"layers \[2\] compute attention by themselves"):
            model(input_ids=tiny.tokens(9), cache=cache)
        model.model.layers[2].self_attn.forward = whole
        assert torch.equal(tiny.by_hand(model, None, tiny.tokens(9), 1), expected)
        with pytest.raises(CacheStateError, match="failed half way"):
            model(input_ids=tiny.tokens(1), cache=cache)


# What a policy is shown, and what it gives.


class Curious(H2O):
    """A policy that wants to see more than there is."""

    name = "curious"

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"attention", "gradients"})


class Generous(H2O):
    """A policy whose layers get more than there is."""

    name = "generous"

    def at_layer(self, depth: int, layers: int) -> H2O:
        return H2O(budget=self.budget + (depth == 0))


@pytest.mark.parametrize(
    ("policy", "error", "words"),
    [
        (Curious(budget=64), UnsupportedCall, "curious needs gradients; a cache shows a policy attention alone"),
        (
            Generous(budget=64),
            BudgetError,
            "generous gives its 4 layers 257 tokens together, and 4 times .* 64 are 256",
        ),
        (PyramidKV(budget=64, sinks=24), BudgetError, "pyramidkv gives its 4 layers .* are 256; raise the budget"),
    ],
)
def test_policies_that_ask_for_more_than_there_is(model: Any, policy: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        WindowCache(model, policy=policy)


def at_once(model: Any, cache: Any) -> None:
    model(input_ids=tiny.tokens(9, seed=2), cache=cache)


def one_by_one(model: Any, cache: Any) -> None:
    for token in tiny.tokens(9, seed=2)[0]:
        model(input_ids=token.view(1, 1), cache=cache)


@pytest.mark.parametrize("feed", [at_once, one_by_one])
@pytest.mark.parametrize("policy", [H2O(budget=20, recent_window=4), SnapKV(budget=20, recent_window=4)])
def test_attention_that_is_no_number_never_decides_what_is_kept(
    model: Any, policy: Any, feed: Callable[[Any, Any], None]
) -> None:
    """A weight that is no number compares with nothing: from the first one on, the kept set would be an accident."""
    cache = PolicyCache(model, policy)
    with shown(model):
        model(input_ids=tiny.tokens(30), cache=cache)
        before = cache.kept_by_layer()
        weight = model.model.layers[1].self_attn.q_proj.weight
        healthy = weight[0].clone()
        weight[0] = torch.nan
        with pytest.raises(UnsupportedModel, match=f"attention is not a number, so {policy.name} cannot tell"):
            feed(model, cache)
        assert cache.seen == 30
        for layer, positions in cache.kept_by_layer().items():
            assert np.array_equal(positions, before[layer])
        weight[0] = healthy
        with pytest.raises(CacheStateError, match="failed half way"):
            feed(model, cache)
        cache.reset()
        feed(model, cache)
    assert cache.seen == 9


def test_a_prompt_whose_attention_is_no_number_is_not_picked_from(model: Any) -> None:
    cache = PolicyCache(model, SnapKV(budget=20, recent_window=4), mode="prompt")
    with shown(model):
        model.model.layers[1].self_attn.q_proj.weight[0] = torch.nan
        with pytest.raises(UnsupportedModel, match="attention is not a number, so snapkv cannot tell"):
            model(input_ids=tiny.tokens(30), cache=cache)
    assert cache.seen == 0
