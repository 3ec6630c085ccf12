"""The drop-in cache under `generate` and under plain forward passes: what it holds, what it costs, what it refuses."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from headwater.cache.adapter import WindowCache
from headwater.errors import BudgetError, CacheStateError, UnsupportedCall
from tests import tiny
from tests.reference.raw_keys import turn

# What it holds.


@pytest.mark.parametrize("total", [0, 1, 3, 4, 5, 19, 20, 21, 22, 25, 40])
@pytest.mark.parametrize(
    ("sinks", "pinned", "block"), [(4, 0, 1), (0, 0, 1), (0, 0, 4), (4, 8, 3), (4, 2, 16), (19, 0, 1)]
)
@pytest.mark.parametrize("size", [1, 6, 40])
def test_boundaries(model: Any, total: int, sinks: int, pinned: int, block: int, size: int) -> None:
    """Totals around the budget and the pins, in calls of any size: the held set is the rule's, exactly."""
    cache = WindowCache(model, 20, sinks=sinks, pinned=pinned, block=block)
    tokens = tiny.tokens(max(total, 1))[:, :total]
    with torch.inference_mode():
        for start in range(0, total, size):
            model(input_ids=tokens[:, start : start + size], cache=cache)
    held: list[int] = []
    pins = max(sinks, pinned)
    for position in range(total):
        held.append(position)
        if len(held) > 20:
            del held[pins : pins + block]
    assert cache.kept.tolist() == held
    assert (cache.seen, cache.held) == (total, len(held))
    assert cache.get_seq_length() == total


def test_budget_one_is_legal_and_zero_is_refused(model: Any) -> None:
    cache = WindowCache(model, 1, sinks=0)
    tiny.generate(model, cache, tiny.tokens(3), 5)
    assert cache.kept.tolist() == [6]
    with pytest.raises(BudgetError, match="budget must be at least 1 token, got 0"):
        WindowCache(model, 0, sinks=0)


def test_the_default_block_is_a_sixteenth_of_the_window(model: Any) -> None:
    assert WindowCache(model, 324, sinks=4).window.block == 20
    assert WindowCache(model, 12, sinks=4).window.block == 1


@pytest.mark.parametrize("block", [1, 4])
def test_positions_held_are_those_of_the_newest_tokens(model: Any, block: int) -> None:
    cache = WindowCache(model, 20, sinks=4, block=block)
    tiny.generate(model, cache, tiny.tokens(10), 100)
    kept = cache.kept
    assert kept[:4].tolist() == [0, 1, 2, 3]
    assert kept[-1] == cache.seen - 1
    assert np.array_equal(kept[4:], np.arange(kept[4], cache.seen))


# Under generate.


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_generate_equals_our_own_loop(attention: str) -> None:
    model = tiny.build("llama", attention=attention)
    prompt = tiny.tokens(12, rows=2)
    ours = tiny.by_hand(model, WindowCache(model, 20, block=1), prompt, 60)
    theirs = tiny.generate(model, WindowCache(model, 20, block=1), prompt, 60)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", [name for name, family in tiny.FAMILIES.items() if family.refused is None])
def test_every_family_generates_what_our_own_loop_does(name: str) -> None:
    """`generate` passes masks and positions that a plain forward pass does not, and hybrids build a mask per layer
    type."""
    model = tiny.build(name)
    prompt = tiny.tokens(30, rows=2)
    ours = tiny.by_hand(model, WindowCache(model, 20, block=3), prompt, 30)
    theirs = tiny.generate(model, WindowCache(model, 20, block=3), prompt, 30)
    assert torch.equal(ours, theirs)


def test_nothing_changes_while_everything_fits(model: Any) -> None:
    prompt = tiny.tokens(12)
    assert torch.equal(
        tiny.generate(model, WindowCache(model, 64), prompt, 50), tiny.generate(model, DynamicCache(), prompt, 50)
    )


def test_both_attention_implementations_agree_past_the_budget() -> None:
    logits = {}
    for attention in ("sdpa", "eager"):
        model = tiny.build("llama", attention=attention)
        cache = WindowCache(model, 20)
        with torch.inference_mode():
            model(input_ids=tiny.tokens(50), cache=cache)
            logits[attention] = model(input_ids=tiny.tokens(7, seed=3), cache=cache).logits
    torch.testing.assert_close(logits["sdpa"], logits["eager"], atol=5e-5, rtol=1e-4)


def test_a_prompt_of_several_budgets_in_chunks_and_at_once_holds_the_same(model: Any) -> None:
    prompt = tiny.tokens(90)
    whole, pieces = WindowCache(model, 20), WindowCache(model, 20)
    tiny.generate(model, whole, prompt, 1)
    tiny.generate(model, pieces, prompt, 1, prefill_chunk_size=7)
    assert whole.kept.tolist() == pieces.kept.tolist()


def test_two_turns_with_full_history_equal_one_long_run(model: Any) -> None:
    """transformers#31381 and others: a second turn of several tokens after the window has slid."""
    first, second = tiny.tokens(12), tiny.tokens(9, seed=5)
    cache = WindowCache(model, 20, block=1)
    answer = tiny.generate(model, cache, first, 40)
    history = torch.cat((answer, second), dim=1)
    turn = tiny.generate(model, cache, history, 30)
    other = WindowCache(model, 20, block=1)
    with torch.inference_mode():
        model(input_ids=answer[:, :12], cache=other)
        for index in range(12, answer.shape[1] - 1):
            model(input_ids=answer[:, index : index + 1], cache=other)
        # generate fed the unseen rest in one call: the last answered token and the new ones
        assert other.seen == answer.shape[1] - 1
        ids = history
        fed = other.seen
        for _ in range(30):
            logits = model(input_ids=ids[:, fed:], cache=other).logits[:, -1]
            fed = ids.shape[1]
            ids = torch.cat((ids, logits.argmax(-1, keepdim=True)), dim=1)
    assert torch.equal(turn, ids)


def test_sampling_is_the_host_models_own(model: Any) -> None:
    runs = []
    for _ in range(2):
        torch.manual_seed(7)
        runs.append(tiny.generate(model, WindowCache(model, 20), tiny.tokens(12), 60, do_sample=True, temperature=1.5))
    assert torch.equal(*runs)


def test_beams_and_returned_sequences_equal_those_of_the_stock_cache_while_all_fits(model: Any) -> None:
    prompt = tiny.tokens(12, rows=2)
    options = {"num_beams": 3, "num_return_sequences": 2}
    assert torch.equal(
        tiny.generate(model, WindowCache(model, 64), prompt, 30, **options),
        tiny.generate(model, DynamicCache(), prompt, 30, **options),
    )


def test_beams_past_the_budget_score_as_each_beam_alone(model: Any) -> None:
    """Rows are reordered at every step: pins, their pristine copies and the window must follow."""
    out = model.generate(
        tiny.tokens(12),
        cache=WindowCache(model, 20, block=1),
        max_new_tokens=50,
        num_beams=3,
        num_return_sequences=3,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        length_penalty=0.0,
    )
    for sequence, score in zip(out.sequences, out.sequences_scores, strict=True):
        cache = WindowCache(model, 20, block=1)
        with torch.inference_mode():
            logits = [model(input_ids=sequence[None, :12], cache=cache).logits[0, -1]]
            logits += [model(input_ids=token[None, None], cache=cache).logits[0, -1] for token in sequence[12:-1]]
        alone = torch.stack(logits).log_softmax(-1).gather(1, sequence[12:, None]).sum()
        torch.testing.assert_close(alone, score, atol=2e-3, rtol=1e-4)


def test_a_row_of_a_batch_equals_its_run_alone(model: Any) -> None:
    prompt = tiny.tokens(12, rows=3)
    together = tiny.generate(model, WindowCache(model, 20), prompt, 60)
    for row in range(3):
        alone = tiny.generate(model, WindowCache(model, 20), prompt[row : row + 1], 60)
        assert torch.equal(together[row], alone[0])


def test_repeating_and_selecting_rows(model: Any) -> None:
    cache = WindowCache(model, 20, block=1)
    with torch.inference_mode():
        model(input_ids=tiny.tokens(50, rows=2), cache=cache)
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([3, 0]))
        other = WindowCache(model, 20, block=1)
        model(input_ids=tiny.tokens(50, rows=2), cache=other)
        for _ in range(2):  # the second step sees pins turned from the pristine copies, which must have followed
            swapped = model(input_ids=tiny.tokens(1).repeat(2, 1), cache=cache).logits
            plain = model(input_ids=tiny.tokens(1).repeat(2, 1), cache=other).logits
            torch.testing.assert_close(swapped.flip(0), plain)


# What nothing may leak from.


@pytest.mark.parametrize("size", [1, 5, 33])
def test_no_token_sees_the_future(model: Any, size: int) -> None:
    """Change a token: no logits before it move, in the first chunk and in chunks after the ring has wrapped."""
    tokens = tiny.tokens(66)
    changed = tokens.clone()
    changed[0, 60] = (changed[0, 60] + 1) % tiny.VOCAB
    runs = []
    for ids in (tokens, changed):
        cache = WindowCache(model, 20)
        with torch.inference_mode():
            parts = [model(input_ids=ids[:, i : i + size], cache=cache).logits for i in range(0, 66, size)]
        runs.append(torch.cat(parts, dim=1))
    assert torch.equal(runs[0][:, :60], runs[1][:, :60])
    assert not torch.equal(runs[0][:, 60:], runs[1][:, 60:])


def test_every_held_token_is_seen(model: Any) -> None:
    """Change the value of any pin or any token of the window: the next logits move."""

    def logits_after_changing(slot: int | None) -> torch.Tensor:
        cache = WindowCache(model, 20, block=1)
        with torch.inference_mode():
            model(input_ids=tiny.tokens(50), cache=cache)
            bank = next(iter(cache.ring.banks.values()))
            if slot is not None:
                bank.values[:, :, :, slot] += 1
            return model(input_ids=tiny.tokens(1), cache=cache).logits

    before = logits_after_changing(None)
    assert torch.equal(before, logits_after_changing(None))
    assert torch.equal(before, logits_after_changing(20)), "the slot beyond what is held was seen"
    for slot in range(20):
        assert not torch.equal(before, logits_after_changing(slot))


def test_two_caches_on_one_model_do_not_see_each_other(model: Any) -> None:
    alone = tiny.generate(model, WindowCache(model, 20), tiny.tokens(12), 40)
    a, b = WindowCache(model, 20), WindowCache(model, 33, sinks=1)
    ids, other = tiny.tokens(12), tiny.tokens(12, seed=9)
    with torch.inference_mode():
        model(input_ids=other, cache=b)
        for step in range(40):
            new = ids if step == 0 else ids[:, -1:]
            ids = torch.cat((ids, model(input_ids=new, cache=a).logits[:, -1].argmax(-1, keepdim=True)), dim=1)
            model(input_ids=other[:, :1], cache=b)
    assert torch.equal(ids, alone)


def test_a_second_run_after_reset_equals_the_first(model: Any) -> None:
    cache = WindowCache(model, 20)
    first = tiny.generate(model, cache, tiny.tokens(12), 60)
    cache.reset()
    assert (cache.seen, cache.held, cache.nbytes) == (0, 0, 0)
    assert torch.equal(tiny.generate(model, cache, tiny.tokens(12), 60), first)


def test_the_model_is_left_as_it_was(model: Any) -> None:
    base = model.base_model
    cache = WindowCache(model, 20)
    tiny.generate(model, cache, tiny.tokens(12), 5)
    assert len(base._forward_pre_hooks) == len(base._forward_hooks) == 1
    del cache
    gc.collect()
    assert not base._forward_pre_hooks
    assert not base._forward_hooks


def test_a_forward_pass_that_fails_leaves_the_cache_as_it_was(model: Any) -> None:
    cache = WindowCache(model, 20, block=1)
    layer = model.model.layers[2]
    with torch.inference_mode():
        for total in (8, 40):
            model(input_ids=tiny.tokens(total), cache=cache)
            broken = layer.mlp.forward
            layer.mlp.forward = lambda *_: (_ for _ in ()).throw(RuntimeError("out of memory"))
            with pytest.raises(RuntimeError, match="out of memory"):
                model(input_ids=tiny.tokens(30, seed=4), cache=cache)
            layer.mlp.forward = broken
            after = model(input_ids=tiny.tokens(3, seed=5), cache=cache).logits
            fresh = WindowCache(model, 20, block=1)
            if total == 40:
                model(input_ids=tiny.tokens(8), cache=fresh)
                model(input_ids=tiny.tokens(3, seed=5), cache=fresh)
            model(input_ids=tiny.tokens(total), cache=fresh)
            assert torch.equal(after, model(input_ids=tiny.tokens(3, seed=5), cache=fresh).logits)


# What it costs.


@pytest.mark.parametrize(("budget", "sinks"), [(20, 4), (33, 0), (64, 40)])
def test_physical_bytes_are_the_budget_and_one_slot_and_the_pristine_pins(model: Any, budget: int, sinks: int) -> None:
    cache = WindowCache(model, budget, sinks=sinks)
    layers, kv_heads, dim = 4, 2, 8
    for prompt in (tiny.tokens(10), tiny.tokens(200)):  # the second one is several budgets in one call
        cache.reset()
        tiny.generate(model, cache, prompt, 90)
        assert cache.nbytes == layers * kv_heads * dim * 4 * (2 * (budget + 1) + sinks)
        live = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for layer in range(4)
            for t in _returned(cache, layer)
        }
        assert sum(live.values()) <= cache.nbytes


def _returned(cache: WindowCache, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape, index = cache.ring._place[layer]
    return cache.ring.banks[shape].view(index, 0, cache.held)


def test_a_decoding_step_returns_views_of_the_buffers(model: Any) -> None:
    cache = WindowCache(model, 20, block=1)
    tiny.generate(model, cache, tiny.tokens(12), 40)
    seen: list[int] = []
    update = cache.ring.update
    cache.ring.update = lambda *a: (out := update(*a), seen.append(out[0].untyped_storage().data_ptr()))[0]  # type: ignore[method-assign]
    with torch.inference_mode():
        model(input_ids=tiny.tokens(1), cache=cache)
    assert set(seen) == {next(iter(cache.ring.banks.values())).keys.untyped_storage().data_ptr()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    model = tiny.build("llama", dtype=dtype)
    cache = WindowCache(model, 20)
    out = tiny.generate(model, cache, tiny.tokens(12), 60)
    assert out.shape == (1, 72)
    bank = next(iter(cache.ring.banks.values()))
    assert bank.keys.dtype == dtype
    assert bank.pristine.dtype == torch.float32


def test_pins_do_not_drift_in_bfloat16() -> None:
    """A thousand evictions: the pins carry the rounding of one rotation, not of a thousand."""
    model = tiny.build("llama", dtype=torch.bfloat16, max_position_embeddings=8192)
    cache = WindowCache(model, 20, sinks=4, block=1)
    tiny.generate(model, cache, tiny.tokens(12), 1000)
    bank = next(iter(cache.ring.banks.values()))
    rotation = bank.shape.rotation
    assert rotation is not None
    shift = cache.ring.ledger.gone - cache.ring.base
    exact = torch.stack([turn(layer.double(), [shift] * 4, rotation) for layer in bank.pristine])
    error = (bank.keys[..., :4, :].double() - exact).abs().max() / exact.abs().max()
    assert shift > 900
    assert error <= torch.finfo(torch.bfloat16).eps / 2


# Tokens taken back.


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_rollback_is_exact(name: str) -> None:
    model = tiny.build(name)
    cache, other = WindowCache(model, 20, block=8), WindowCache(model, 20, block=8)
    with torch.inference_mode():
        model(input_ids=tiny.tokens(12), cache=cache)
        model(input_ids=tiny.tokens(3, seed=2), cache=cache)
        cache.rollback(3)
        after = model(input_ids=tiny.tokens(5, seed=3), cache=cache).logits
        model(input_ids=tiny.tokens(12), cache=other)
        plain = model(input_ids=tiny.tokens(5, seed=3), cache=other).logits
    assert cache.kept.tolist() == other.kept.tolist()
    torch.testing.assert_close(after, plain, atol=1e-5, rtol=1e-5)


def test_rollback_after_the_window_slid(model: Any) -> None:
    cache, other = WindowCache(model, 20, block=8), WindowCache(model, 20, block=8)
    with torch.inference_mode():
        for each in (cache, other):
            model(input_ids=tiny.tokens(40), cache=each)
        model(input_ids=tiny.tokens(4, seed=2), cache=cache)
        cache.rollback(4)
        assert cache.kept.tolist() == other.kept.tolist()
        after = model(input_ids=tiny.tokens(5, seed=3), cache=cache).logits
        plain = model(input_ids=tiny.tokens(5, seed=3), cache=other).logits
    torch.testing.assert_close(after, plain, atol=1e-5, rtol=1e-5)
    with pytest.raises(CacheStateError, match="cannot roll back 30 tokens"):
        cache.rollback(30)


def test_rollback_in_a_hybrid_model_that_has_slid_is_refused() -> None:
    model = tiny.build("gemma3")
    cache = WindowCache(model, 64)
    with torch.inference_mode():
        model(input_ids=tiny.tokens(40), cache=cache)
    with pytest.raises(UnsupportedCall, match="cannot take tokens back"):
        cache.rollback(1)
    assert cache.seen == 40


def test_dropping_tokens_by_hand(model: Any) -> None:
    cache = WindowCache(model, 20, sinks=4, block=1)
    with torch.inference_mode():
        model(input_ids=tiny.tokens(18), cache=cache)
        assert cache.evict(6) == (4, 10)
        assert cache.kept.tolist() == [*range(4), *range(10, 18)]
        model(input_ids=tiny.tokens(5), cache=cache)
    assert cache.kept.tolist() == [*range(4), *range(10, 23)]


def test_a_chunk_never_reaches_where_the_frequencies_change() -> None:
    """A stream's own chunks of 64 tokens were refused by a model whose frequencies change at 64."""
    model = tiny.build("dynamic", max_position_embeddings=64)
    cache = WindowCache(model, 20, block=3)
    cache.stepwise = True
    tokens, start = tiny.tokens(300), 0
    with torch.inference_mode():
        while start < 300:
            count = cache.exact_chunk(300 - start)
            model(input_ids=tokens[:, start : start + count], cache=cache)
            start += count
    assert cache.seen == 300
