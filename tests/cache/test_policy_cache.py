"""Policies that look at attention, live: against the slow twin, in every family, however a text is cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headwater.cache import holdings
from headwater.cache.adapter import WindowCache
from headwater.cache.host import Copies, HostMemory
from headwater.cache.hosted import examine, stock_cache
from headwater.cache.policy_cache import PolicyCache, attach
from headwater.errors import BudgetError, CacheStateError, UnknownName, UnsupportedCall, UsageError
from headwater.policies import POLICIES, Policy, Tova, policy
from tests import tiny
from tests.reference.kept_heads import KeptHeads

SUPPORTED = [name for name, family in tiny.FAMILIES.items() if family.refused is None]
SMALL: dict[str, dict[str, Any]] = {
    "h2o": {"recent_window": 4},
    "scissorhands": {"recent_window": 4},
    "tova": {},
    "snapkv": {"recent_window": 4, "obs_window": 5},
    "pyramidkv": {"recent_window": 2, "obs_window": 5},
    "random": {},
}
LOOKING = list(SMALL)


def small(name: str, budget: int = 12, sinks: int = 2) -> Policy[Any]:
    return policy(name, budget=budget, sinks=sinks, **SMALL[name])


def feed(model: Any, cache: PolicyCache, tokens: Tensor, size: int) -> Tensor:
    out = []
    with torch.inference_mode(), attach(model):
        for start in range(0, tokens.shape[1], size):
            out.append(model(input_ids=tokens[:, start : start + size], cache=cache).logits)
    return torch.cat(out, dim=1)


def twin_of(model: Any, choice: Policy[Any], *, compact: bool = True, prompt: int = 0) -> KeptHeads:
    shapes = [shape for shape in examine(model).shapes if shape is not None]
    sliding = [getattr(layer, "sliding_window", None) for layer in stock_cache(model).layers]
    return KeptHeads(
        choice, [each.rotation for each in shapes], sliding, shapes[0].kv_heads, compact=compact, prompt=prompt
    )


def check_kept(cache: PolicyCache, twin: KeptHeads) -> None:
    for layer, positions in cache.kept_by_layer().items():
        assert positions.tolist() == twin.kept(layer), layer


@pytest.mark.parametrize("reindex", ["compact", "none"])
@pytest.mark.parametrize("name", LOOKING)
def test_every_policy_equals_the_twin_however_the_text_is_cut(name: str, reindex: str) -> None:
    model = tiny.build("llama")
    tokens = tiny.tokens(44)
    twin = twin_of(model, small(name), compact=reindex == "compact")
    theirs = twin.run(model, tokens[0])
    for size in (1, 7, 44):
        cache = PolicyCache(model, small(name), reindex=reindex)
        ours = feed(model, cache, tokens, size)[0]
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-4)
        check_kept(cache, twin)
        assert cache.seen == 44
        assert cache.held <= max(each.budget for each in cache._policies.values())


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma2"])
@pytest.mark.parametrize("name", ["snapkv", "pyramidkv"])
def test_a_prompt_is_picked_from_at_its_end(name: str, family: str) -> None:
    model, choice, tokens = tiny.build(family), small(name), tiny.tokens(50)
    twin = twin_of(model, choice, prompt=31)
    theirs = twin.run(model, tokens[0])
    cache = PolicyCache(model, choice, mode="prompt")
    first = feed(model, cache, tokens[:, :31], 31)[0]
    assert cache.held <= max(each.budget for each in cache._policies.values())
    ours = torch.cat((first, feed(model, cache, tokens[:, 31:40], 1)[0], feed(model, cache, tokens[:, 40:], 10)[0]))
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-4)
    check_kept(cache, twin)
    with torch.inference_mode():
        whole = model(input_ids=tokens[:, :31]).logits[0]
    torch.testing.assert_close(first, whole, atol=2e-4, rtol=1e-4)


def test_a_prompt_of_the_budget_or_less_is_picked_from_token_by_token() -> None:
    model, choice, tokens = tiny.build("llama"), small("snapkv"), tiny.tokens(40)
    for size in (12, 11, 1):
        ours, plain = PolicyCache(model, choice, mode="prompt"), PolicyCache(model, choice)
        assert torch.equal(feed(model, ours, tokens, size), feed(model, plain, tokens, size))


def test_a_prompt_that_no_policy_picks_from_is_refused() -> None:
    model = tiny.build("llama")
    with pytest.raises(UsageError, match=r"h2o is not defined on the end of a prompt.*snapkv, pyramidkv"):
        WindowCache(model, 60, policy="h2o", mode="prompt")
    with pytest.raises(UsageError, match="mode must be 'decode' or 'prompt'"):
        WindowCache(model, 60, policy="snapkv", mode="promptly")
    with pytest.raises(UsageError, match="a window has no use"):
        WindowCache(model, 12, mode="prompt")
    with pytest.raises(UsageError, match="a window has no use"):
        WindowCache(model, 12, reduce="max")
    assert WindowCache(model, 60, policy="snapkv", mode="prompt").mode == "prompt"


@pytest.mark.parametrize("name", SUPPORTED)
def test_every_family_equals_the_twin(name: str) -> None:
    tokens, choice = tiny.tokens(36), small("h2o")
    model = tiny.build(name, attention=tiny.FAMILIES[name].attention[0])
    twin = twin_of(model, choice)
    theirs = twin.run(model, tokens[0])
    for attention in tiny.FAMILIES[name].attention:
        model = tiny.build(name, attention=attention)
        for size in (5, 36):
            cache = PolicyCache(model, choice)
            torch.testing.assert_close(feed(model, cache, tokens, size)[0], theirs, atol=3e-4, rtol=1e-3)
            check_kept(cache, twin)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss"])
def test_the_twin_equals_the_model_while_all_fits(name: str) -> None:
    model = tiny.build(name, attention=tiny.FAMILIES[name].attention[0])
    tokens = tiny.tokens(30)
    twin = twin_of(model, small("tova", budget=64))
    with torch.inference_mode():
        expected = model(input_ids=tokens).logits[0]
    torch.testing.assert_close(twin.run(model, tokens[0]), expected, atol=2e-4, rtol=1e-4)


def test_heads_of_a_layer_keep_different_positions() -> None:
    model = tiny.build("llama")
    cache = PolicyCache(model, small("h2o"))
    feed(model, cache, tiny.tokens(80), 80)
    kept = cache.kept_by_layer()
    assert any((positions[0] != positions[1]).any() for positions in kept.values())
    assert all((np.diff(positions, axis=1) > 0).all() for positions in kept.values())


def test_rows_of_a_batch_are_each_as_if_alone() -> None:
    model = tiny.build("qwen3")
    tokens = tiny.tokens(60, rows=3)
    cache = PolicyCache(model, small("snapkv"))
    together = feed(model, cache, tokens, 9)
    for row in range(3):
        alone = PolicyCache(model, small("snapkv"))
        torch.testing.assert_close(feed(model, alone, tokens[row : row + 1], 9)[0], together[row], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", LOOKING)
def test_storage_is_the_budget_and_one(name: str) -> None:
    model = tiny.build("llama")
    cache = PolicyCache(model, small(name))
    feed(model, cache, tiny.tokens(100), 33)
    budgets = [each.budget for each in cache._policies.values()]
    assert cache.nbytes == sum(2 * 2 * (budget + 1) * 8 * 4 for budget in budgets)
    if name == "pyramidkv":
        assert len(set(budgets)) > 1
        assert 4 * 12 - 4 < sum(budgets) <= 4 * 12
    cache.reset()
    assert cache.nbytes == cache.seen == cache.held == 0


def test_all_policies_that_do_not_window_are_here() -> None:
    assert set(LOOKING) | {"random"} >= {name for name, kind in POLICIES.items() if kind().needs}


# The drop-in class, and attach.


def test_a_window_cache_of_another_policy_is_this_cache() -> None:
    model = tiny.build("llama")
    cache = WindowCache(model, budget=20, sinks=4, policy="tova")
    assert isinstance(cache, PolicyCache)
    assert cache.policy == Tova(budget=20, sinks=4)
    assert WindowCache(model, 20, pinned=7, policy="tova").policy.sinks == 7
    assert WindowCache(model, policy=Tova(budget=9)).policy.budget == 9
    window = WindowCache(model, 20, policy="sliding-window")
    assert isinstance(window, WindowCache)
    assert window.window == WindowCache(model, 20, sinks=0).window
    for name in LOOKING:
        assert isinstance(WindowCache(model, 128, policy=name), PolicyCache)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"policy": "full", "budget": 20}, UnsupportedCall, "full never evicts; use the model's own cache"),
        ({"policy": "elephant", "budget": 20}, UnknownName, "unknown policy 'elephant'"),
        ({"policy": "h2o", "budget": 20, "sinks": 20}, BudgetError, "sinks must be below the budget"),
        ({"policy": "tova", "budget": 20, "block": 4}, UsageError, "leave block=4 out"),
        ({"policy": "tova", "budget": 20, "reduce": "median"}, UsageError, "reduce must be one of mean, sum, max"),
        ({"policy": "tova", "budget": 20, "reindex": "maybe"}, UsageError, "reindex must be 'compact' or 'none'"),
        ({"policy": "tova", "budget": 512}, BudgetError, "lower the budget"),
        ({"policy": "sliding-window", "budget": 20, "sinks": 4}, UsageError, "no parameter 'sinks'"),
        ({"policy": Tova(budget=9), "budget": 20}, UsageError, "takes no parameters"),
        ({}, BudgetError, "needs a budget"),
    ],
)
def test_what_cannot_be_is_refused_by_name(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        WindowCache(tiny.build("llama"), **options)


def test_attach_leaves_nothing_behind() -> None:
    model = tiny.build("llama")
    tokens, before = tiny.tokens(20), dict(vars(model.config))
    hooks = len(model.base_model._forward_hooks), len(model.base_model._forward_pre_hooks)
    with torch.inference_mode():
        expected = model(input_ids=tokens).logits
        with pytest.raises(RuntimeError, match="on purpose"), attach(model), attach(model):
            cache = PolicyCache(model, small("h2o"))
            model(input_ids=tokens, cache=cache)
            torch.testing.assert_close(model(input_ids=tokens).logits, expected, atol=1e-6, rtol=1e-5)
            del cache
            raise RuntimeError("on purpose")
        assert torch.equal(model(input_ids=tokens).logits, expected)
    assert dict(vars(model.config)) == before
    assert (len(model.base_model._forward_hooks), len(model.base_model._forward_pre_hooks)) == hooks


def test_without_attach_it_is_refused_before_anything_runs() -> None:
    model = tiny.build("llama")
    cache = PolicyCache(model, small("h2o"))
    with torch.inference_mode(), pytest.raises(UnsupportedCall, match=r"with headwater\.attach\(model\)"):
        model(input_ids=tiny.tokens(5), cache=cache)
    assert cache.seen == 0
    feed(model, cache, tiny.tokens(5), 5)


def test_two_conversations_on_one_model_do_not_see_each_other() -> None:
    model = tiny.build("llama")
    one, two = tiny.tokens(80, rows=2)[:, None]
    alone = [feed(model, PolicyCache(model, small("h2o")), each, 80) for each in (one, two)]
    first, second = PolicyCache(model, small("h2o")), PolicyCache(model, small("tova"))
    stock = stock_cache(model)
    out = []
    with torch.inference_mode(), attach(model):
        for start in range(0, 80, 8):
            part = slice(start, start + 8)
            out.append(model(input_ids=one[:, part], cache=first).logits)
            model(input_ids=two[:, part], cache=second)
            model(input_ids=two[:, part], cache=stock)
    torch.testing.assert_close(torch.cat(out, dim=1), alone[0], atol=2e-5, rtol=1e-4)
    assert stock.get_seq_length() == 80


@pytest.mark.parametrize("name", ["tova", "h2o", "snapkv"])
def test_generate_goes_on_past_the_budget_and_equals_our_own_loop(name: str) -> None:
    model = tiny.build("llama")
    tokens = tiny.tokens(9)
    ours: list[int] = []
    cache = PolicyCache(model, small(name))
    logits = feed(model, cache, tokens, 9)[0, -1]
    for _ in range(60):
        ours.append(int(logits.argmax()))
        logits = feed(model, cache, torch.tensor([[ours[-1]]]), 1)[0, -1]
    with attach(model):
        cache = PolicyCache(model, small(name))
        out = model.generate(tokens, cache=cache, max_new_tokens=60, do_sample=False, eos_token_id=None)
    assert out[0, 9:].tolist() == ours
    assert cache.held == 12


def test_beams_and_several_sequences() -> None:
    model = tiny.build("llama")
    with attach(model):
        cache = PolicyCache(model, small("snapkv"))
        out = model.generate(
            tiny.tokens(9), cache=cache, max_new_tokens=40, num_beams=3, do_sample=False, eos_token_id=None
        )
        best = out[0]
        again = PolicyCache(model, small("snapkv"))
        sampled = model.generate(
            tiny.tokens(9), cache=again, max_new_tokens=30, num_return_sequences=2, do_sample=True, eos_token_id=None
        )
    assert out.shape == (1, 49)
    assert sampled.shape == (2, 39)
    assert cache.groups[0].rows == 3 * 2
    alone = PolicyCache(model, small("snapkv"))
    scores = feed(model, alone, best[None], 49)[0, 8:-1].log_softmax(-1)
    assert scores.gather(1, best[9:, None]).sum() < 0


def test_a_forward_pass_that_failed_half_way_is_named() -> None:
    model = tiny.build("llama")
    cache = PolicyCache(model, small("h2o"))
    feed(model, cache, tiny.tokens(30), 30)

    def broken(*_: Any) -> None:
        raise RuntimeError("half way")

    handle = model.model.layers[2].register_forward_pre_hook(broken)
    with pytest.raises(RuntimeError, match="half way"):
        feed(model, cache, tiny.tokens(3), 3)
    handle.remove()
    with pytest.raises(CacheStateError, match=r"failed half way.*reset"):
        feed(model, cache, tiny.tokens(3), 3)
    with torch.inference_mode():
        model(input_ids=tiny.tokens(3))
    cache.reset()
    fresh = PolicyCache(model, small("h2o"))
    tokens = tiny.tokens(40)
    assert torch.equal(feed(model, cache, tokens, 40), feed(model, fresh, tokens, 40))


@pytest.mark.parametrize("name", LOOKING)
def test_tokens_taken_back_were_never_there(name: str) -> None:
    """Before anything left, in one call or several, more than once; and what follows crosses evictions."""
    model, tokens, other = tiny.build("llama"), tiny.tokens(70), tiny.tokens(5, seed=2)
    choice = small(name, budget=60 if name == "pyramidkv" else 40)  # whose last layers get less
    for size in (1, 15):
        cache, plain = PolicyCache(model, choice), PolicyCache(model, choice)
        feed(model, plain, tokens[:, :15], size)
        feed(model, cache, tokens[:, :15], size)
        feed(model, cache, other[:, :5], size)
        cache.rollback(3)
        cache.rollback(2)
        assert cache.seen == 15
        torch.testing.assert_close(
            feed(model, cache, tokens[:, 15:], 20), feed(model, plain, tokens[:, 15:], 20), atol=1e-5, rtol=1e-5
        )
        for layer, positions in cache.kept_by_layer().items():
            assert positions.tolist() == plain.kept_by_layer()[layer].tolist()


def test_tokens_that_made_others_leave_cannot_be_taken_back() -> None:
    model = tiny.build("llama")
    cache = PolicyCache(model, small("h2o", budget=200))
    feed(model, cache, tiny.tokens(200), 200)
    cache.rollback(holdings.ROLLBACK)
    feed(model, cache, tiny.tokens(holdings.ROLLBACK), 30)
    assert cache.seen == 200
    with pytest.raises(CacheStateError, match=r"the policy has learned from their attention.*at most 64 are sure"):
        cache.rollback(100)
    feed(model, cache, tiny.tokens(1), 1)
    with pytest.raises(CacheStateError, match=r"the newest 0 alone.*none for which another has left"):
        cache.rollback(1)
    cache.rollback(0)
    assert cache.seen == 201
    assert set(cache.kept) <= set(range(201))
    with pytest.raises(UsageError, match="201 were fed"):
        cache.rollback(202)


def test_a_saved_cache_takes_back_what_came_after(tmp_path: Any) -> None:
    model, choice = tiny.build("llama"), small("snapkv", budget=30)
    cache, again = PolicyCache(model, choice), PolicyCache(model, choice)
    feed(model, cache, tiny.tokens(20), 20)
    again.load(cache.state(HostMemory().copies()))
    expected = feed(model, cache, tiny.tokens(20, seed=2), 3)
    feed(model, again, tiny.tokens(7, seed=1), 7)
    with pytest.raises(CacheStateError, match="the newest 7 alone"):
        again.rollback(8)
    again.rollback(7)
    torch.testing.assert_close(feed(model, again, tiny.tokens(20, seed=2), 3), expected, atol=1e-5, rtol=1e-5)


def test_a_layer_that_has_slid_cannot_go_back() -> None:
    model = tiny.build("gemma3")
    cache = PolicyCache(model, small("h2o", budget=60))
    feed(model, cache, tiny.tokens(40), 40)
    with pytest.raises(UnsupportedCall, match="once it has slid"):
        cache.rollback(1)
    assert cache.seen == 40


def test_prompt_lookup_is_refused_before_it_begins() -> None:
    model = tiny.build("llama")
    with attach(model), pytest.raises(UnsupportedCall, match="prompt-lookup"):
        model.generate(
            tiny.tokens(9), cache=PolicyCache(model, small("h2o")), prompt_lookup_num_tokens=3, max_new_tokens=5
        )


def test_another_batch_or_dtype_in_the_middle_is_refused() -> None:
    model = tiny.build("llama")
    cache = PolicyCache(model, small("h2o"))
    feed(model, cache, tiny.tokens(5), 5)
    with pytest.raises(CacheStateError, match="batch of 1 rows and was given 2"):
        feed(model, cache, tiny.tokens(5, rows=2), 5)
    cache.reset()
    feed(model, cache, tiny.tokens(5), 5)
    model.double()
    with pytest.raises(CacheStateError, match=r"torch\.float32.*given.*torch\.float64"):
        feed(model, cache, tiny.tokens(5), 5)


@pytest.mark.parametrize("name", [*LOOKING, "gemma3"])
def test_what_was_saved_goes_on_to_the_bit(name: str) -> None:
    model = tiny.build("gemma3" if name == "gemma3" else "llama")
    choice = small("h2o" if name == "gemma3" else name)
    tokens = tiny.tokens(70)
    for at in (0, 7, 40):
        cache, again = PolicyCache(model, choice), PolicyCache(model, choice)
        if at:
            feed(model, cache, tokens[:, :at], 9)
        again.load(cache.state(Copies([])))
        ours, theirs = (feed(model, each, tokens[:, at:], 4) for each in (again, cache))
        assert torch.equal(ours, theirs)
        for layer, positions in cache.kept_by_layer().items():
            assert np.array_equal(positions, again.kept_by_layer()[layer])
