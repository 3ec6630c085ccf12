"""K and V in int8: against the slow twin, against the cache in full precision, and what they take."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headwater.cache.adapter import WindowCache
from headwater.cache.host import HostMemory
from headwater.cache.hosted import examine, stock_cache
from headwater.cache.quantised import quantise, runs
from headwater.errors import CacheStateError, SnapshotError, UnknownName, UnsupportedCall
from tests import tiny
from tests.cache.test_twin import SUPPORTED, feed, short, twin_of
from tests.reference.quantised_keys import QuantisedKeys, by_vector


def quantised(model: Any, budget: int = 36, **options: Any) -> Any:
    return WindowCache(model, budget, kv_dtype="int8", **options)


def twin(model: Any, cache: Any, *, reindex: bool = True, rounds: bool = True) -> QuantisedKeys:
    known = [shape for shape in examine(model).shapes if shape is not None]
    slides = [getattr(layer, "sliding_window", None) for layer in stock_cache(model).layers]
    frame, group = cache._rebase_at, cache.ring.group
    return QuantisedKeys(known, slides, cache.window, frame=frame, group=group, reindex=reindex, rounds=rounds)


def near(ours: Tensor, theirs: Tensor, full: Tensor) -> None:
    """The same but for numbers that lie on the edge between two integers: next to the error of int8 itself, nothing."""
    error = (theirs - full).abs().mean()
    assert error > 0, "nothing was quantised"
    assert (ours - theirs).abs().mean() < error / 20


# One vector.


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=40))
def test_a_vector_comes_back_within_half_a_scale(numbers: list[float]) -> None:
    vector = torch.tensor(numbers)[None, None, None]
    there = quantise(vector)
    assert there.numbers.dtype == torch.int8
    assert there.scales.shape == (1, 1, 1, 1)
    scale = vector.abs().max() / 127
    assert (there.full(torch.float32) - vector).abs().max() <= scale * 0.5001 + 1e-37
    torch.testing.assert_close(there.full(torch.float32), by_vector(vector), atol=float(scale) * 1.001 + 1e-37, rtol=0)


def test_every_token_and_head_has_a_scale_of_its_own() -> None:
    vectors = torch.randn(2, 3, 5, 8) * torch.logspace(-3, 3, 30).view(2, 3, 5, 1)
    error = (quantise(vectors).full(torch.float32) - vectors).abs().amax(-1) / vectors.abs().amax(-1)
    assert error.max() < 0.51 / 127


def test_nothing_and_what_is_no_number_stay_what_they_are() -> None:
    assert torch.equal(quantise(torch.zeros(1, 1, 1, 4)).full(torch.float32), torch.zeros(1, 1, 1, 4))
    for wrong in (torch.nan, torch.inf):
        back = quantise(torch.tensor([[[[1.0, wrong]]]])).full(torch.float32)
        assert not back[..., 1].isfinite().any(), "what is no number became one"


@given(st.integers(0, 100), st.integers(0, 9), st.integers(9, 20))
def test_runs_cover_the_numbers_in_their_order(start: int, count: int, slots: int) -> None:
    places = [
        (slot, at)
        for slice_, part in runs(start, start + count, slots)
        for slot, at in zip(range(slice_.start, slice_.stop), range(part.start, part.stop), strict=True)
    ]
    assert places == [((start + at) % slots, at) for at in range(count)]


# Against the twin, and against full precision.


@pytest.mark.parametrize("name", SUPPORTED)
def test_every_family_equals_the_twin_and_is_near_full_precision(name: str) -> None:
    model = tiny.build(name, **short(name))
    tokens = tiny.tokens(130)
    cache, plain = quantised(model, 24, block=5), WindowCache(model, 24, block=5)
    ours, full = feed(model, cache, tokens, 1), feed(model, plain, tokens, 1)
    assert cache.ring.base > 0, "the stream was too short to rebase"
    assert cache.kept.tolist() == plain.kept.tolist()
    near(ours, twin(model, cache).run(model, tokens), full)
    assert (ours - full).std() < full.std() / 20
    torch.testing.assert_close(ours[:, :5], full[:, :5])  # nothing had aged


@pytest.mark.parametrize(("attention", "reindex"), [("sdpa", True), ("eager", True), ("sdpa", False)])
@pytest.mark.parametrize(("budget", "sinks", "block"), [(36, 4, 1), (36, 0, 7), (36, 20, 16), (90, 4, 3), (12, 8, 1)])
def test_a_chunk_equals_token_by_token(budget: int, sinks: int, block: int, attention: str, reindex: bool) -> None:
    """Across groups that age, evictions and frames; float64, where next to no number lies on an edge."""
    model = tiny.build("llama", attention=attention, dtype=torch.float64, max_position_embeddings=95)
    tokens = tiny.tokens(200)
    options: dict[str, Any] = {"sinks": sinks, "block": block, "reindex": "auto" if reindex else "none"}
    full = feed(model, WindowCache(model, budget, **options), tokens, 64)
    cache = quantised(model, budget, **options)
    single = feed(model, cache, tokens, 1)
    assert cache.ring.base > 0
    kept = cache.kept.tolist()
    for size in (7, 200):
        cache.reset()
        near(feed(model, cache, tokens, size), single, full)
        assert cache.kept.tolist() == kept


@pytest.mark.parametrize("name", ["gemma3", "cohere2"])
def test_a_chunk_equals_token_by_token_in_a_hybrid(name: str) -> None:
    model = tiny.build(name, dtype=torch.float64, **short(name))
    tokens = tiny.tokens(130)
    single, full = feed(model, quantised(model), tokens, 1), feed(model, WindowCache(model, 36), tokens, 1)
    near(feed(model, quantised(model), tokens, 64), single, full)


def test_left_where_they_were_equals_the_twin() -> None:
    model = tiny.build("glm4", **short("glm4"))
    tokens = tiny.tokens(130)
    cache = quantised(model, reindex="none")
    ours = feed(model, cache, tokens, 1)
    full = feed(model, WindowCache(model, 36, reindex="none"), tokens, 1)
    near(ours, twin(model, cache, reindex=False).run(model, tokens), full)


def test_the_twin_without_rounding_is_the_twin_of_the_ring() -> None:
    model = tiny.build("glm4", **short("glm4"))
    tokens = tiny.tokens(130)
    cache = quantised(model, block=3)
    theirs = twin(model, cache, rounds=False).run(model, tokens)
    torch.testing.assert_close(theirs, twin_of(model, cache.window).run(model, tokens), atol=2e-4, rtol=1e-4)


# What is held, and in what.


@pytest.mark.parametrize("size", [1, 6, 40, 150])
@pytest.mark.parametrize(("sinks", "block"), [(4, 1), (0, 9), (35, 1)])
def test_the_held_set_is_the_rule_s_and_the_newest_are_exact(model: Any, sinks: int, block: int, size: int) -> None:
    cache, plain = quantised(model, sinks=sinks, block=block), WindowCache(model, 36, sinks=sinks, block=block)
    tokens = tiny.tokens(150)
    with torch.inference_mode():
        for start in range(0, 150, size):
            for each in (cache, plain):
                model(input_ids=tokens[:, start : start + size], cache=each)
            assert cache.kept.tolist() == plain.kept.tolist()
            seen, group = cache.seen - sinks, cache.ring.group
            exact = seen - max(cache.ring._aged, cache.ring._gone)
            assert exact == seen or group <= exact < 2 * group


@pytest.mark.parametrize(("budget", "sinks", "group"), [(36, 4, 4), (200, 8, 8), (5, 4, 1), (64, 40, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_physical_bytes_are_those_of_the_formula(budget: int, sinks: int, group: int, dtype: torch.dtype) -> None:
    model = tiny.build("llama", dtype=dtype)
    cache, itemsize = quantised(model, budget, sinks=sinks), dtype.itemsize
    layers, kv_heads, dim = 4, 2, 8
    each = (2 * dim + 8) * (budget - sinks - group) + itemsize * 2 * dim * (sinks + 2 * group - 1) + 4 * dim * sinks
    for prompt in (tiny.tokens(10), tiny.tokens(300)):  # the second one is several budgets in one call
        cache.reset()
        assert cache.nbytes == 0
        tiny.generate(model, cache, prompt, 30)
        assert cache.nbytes == layers * kv_heads * each


def test_a_quarter_of_float32_and_half_of_float16() -> None:
    for dtype, most in ((torch.float32, 0.28), (torch.float16, 0.55)):
        model = tiny.build("llama", dtype=dtype, head_dim=64, max_position_embeddings=8192)
        full, int8 = WindowCache(model, 4000), quantised(model, 4000)
        for cache in (full, int8):
            cache.ring.make_banks(1)
        assert int8.nbytes / full.nbytes < most


def test_no_copy_in_full_precision_stays_alive(model: Any) -> None:
    def alive() -> dict[int, int]:
        gc.collect()
        tensors = [each for each in gc.get_objects() if type(each) is Tensor]
        return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}

    before = alive()
    cache = quantised(model, 200)
    tiny.generate(model, cache, tiny.tokens(300), 20)
    new = {place: size for place, size in alive().items() if place not in before}
    assert sum(new.values()) <= cache.nbytes + 2000


def test_a_token_is_quantised_once() -> None:
    """While the frame moves, and for as long as a token is held, its integers and scales stay to the bit."""
    model = tiny.build("llama", **short("llama"))
    cache = quantised(model)
    tokens = tiny.tokens(300)
    known: dict[int, tuple[Tensor, Tensor]] = {}
    bases = set()
    with torch.inference_mode():
        for index in range(300):
            model(input_ids=tokens[:, index : index + 1], cache=cache)
            ring = cache.ring
            bases.add(ring.base)
            (bank,) = ring.banks.values()
            for number in range(ring._gone, ring._aged):
                slot = number % bank.keys.slots
                now = bank.keys.numbers[..., slot, :].clone(), bank.keys.scales[..., slot, :].clone()
                for a, b in zip(now, known.setdefault(number, now), strict=True):
                    assert torch.equal(a, b)
    assert len(bases) > 3 and len(known) > 250


def test_half_precision() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        model = tiny.build("llama", dtype=dtype, **short("llama"))
        tokens = tiny.tokens(130)
        ours, full = feed(model, quantised(model), tokens, 1), feed(model, WindowCache(model, 36), tokens, 1)
        assert (ours - full).float().std() < full.float().std() / 10


# Under generate, and in batches.


def test_generate_equals_our_own_loop_and_a_second_run_the_first(model: Any) -> None:
    prompt = tiny.tokens(50, rows=2)
    cache = quantised(model)
    ours = tiny.by_hand(model, quantised(model), prompt, 60)
    assert torch.equal(ours, tiny.generate(model, cache, prompt, 60))
    cache.reset()
    assert torch.equal(ours, tiny.generate(model, cache, prompt, 60))


def test_rows_of_a_batch_can_be_repeated_and_selected(model: Any) -> None:
    cache, other = quantised(model), quantised(model)
    with torch.inference_mode():
        model(input_ids=tiny.tokens(70, rows=2), cache=cache)
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([3, 0]))
        model(input_ids=tiny.tokens(70, rows=2), cache=other)
        for _ in range(9):  # long enough for a group to age
            swapped = model(input_ids=tiny.tokens(1).repeat(2, 1), cache=cache).logits
            plain = model(input_ids=tiny.tokens(1).repeat(2, 1), cache=other).logits
            torch.testing.assert_close(swapped.flip(0), plain)


def test_another_batch_is_refused_before_anything_runs(model: Any) -> None:
    cache = quantised(model)
    with torch.inference_mode():
        model(input_ids=tiny.tokens(50), cache=cache)
        with pytest.raises(CacheStateError, match="batch of 1 rows and was given 2"):
            model(input_ids=tiny.tokens(5, rows=2), cache=cache)
    assert cache.ring.step is None and cache.seen == 50


def test_every_held_token_is_seen(model: Any) -> None:
    """Change the value of any token held: the next logits move."""

    def logits_after_changing(index: int | None) -> Tensor:
        cache = quantised(model)
        with torch.inference_mode():
            model(input_ids=tiny.tokens(70), cache=cache)
            (bank,) = cache.ring.banks.values()
            if index is not None and index < len(range(cache.ring._gone, cache.ring._aged)):
                bank.values.numbers[..., (cache.ring._gone + index) % bank.values.slots, :] += 9
            elif index is not None:
                exact = index - (cache.ring._aged - cache.ring._gone)
                bank.values.exact[..., exact, :] += 1
            return model(input_ids=tiny.tokens(1), cache=cache).logits

    before = logits_after_changing(None)
    for index in range(36):
        assert not torch.equal(before, logits_after_changing(index))


def test_a_forward_pass_that_fails_leaves_the_cache_as_it_was(model: Any) -> None:
    cache, fresh = quantised(model), quantised(model)
    layer = model.model.layers[2]
    with torch.inference_mode():
        for each in (cache, fresh):
            model(input_ids=tiny.tokens(50), cache=each)
        whole = layer.mlp.forward
        for count in (1, 30):
            layer.mlp.forward = lambda *_: (_ for _ in ()).throw(RuntimeError("out of memory"))
            with pytest.raises(RuntimeError, match="out of memory"):
                model(input_ids=tiny.tokens(count, seed=4), cache=cache)
            layer.mlp.forward = whole
            after = model(input_ids=tiny.tokens(3, seed=5), cache=cache).logits
            assert torch.equal(after, model(input_ids=tiny.tokens(3, seed=5), cache=fresh).logits)


# Tokens taken back, dropped, skipped.


def test_rollback_that_crosses_no_group_is_exact(model: Any) -> None:
    cache, other = quantised(model, block=12), quantised(model, block=12)
    with torch.inference_mode():
        for each in (cache, other):
            model(input_ids=tiny.tokens(44), cache=each)  # 40 of the window: a group has just aged
        model(input_ids=tiny.tokens(3, seed=2), cache=cache)
        cache.rollback(3)
        for _ in range(9):
            after = model(input_ids=tiny.tokens(1, seed=3), cache=cache).logits
            assert torch.equal(after, model(input_ids=tiny.tokens(1, seed=3), cache=other).logits)


@pytest.mark.parametrize("count", [6, 15, 28, 30])
def test_rollback_into_what_has_aged(count: int) -> None:
    """The held set is the ring's; what was quantised stays so, and what comes anew ages as ever."""
    model = tiny.build("llama", **short("llama"))
    cache, plain = quantised(model, block=1), WindowCache(model, 36, block=1)
    for each in (cache, plain):
        feed(model, each, tiny.tokens(36), 1)
        each.rollback(count)
        assert each.kept.tolist() == list(range(36 - count))
    ours, full = (feed(model, each, tiny.tokens(80, seed=2), 1) for each in (cache, plain))
    assert cache.kept.tolist() == plain.kept.tolist()
    assert (ours - full).std() < full.std() / 10
    with pytest.raises(CacheStateError, match="cannot roll back 2 tokens"):
        cache.rollback(2)


def test_rollback_to_before_the_frame_moved() -> None:
    """What ages anew there is of the new frame, beside tokens of the old one."""
    model = tiny.build("llama")
    cache, plain = quantised(model, block=28), WindowCache(model, 36, block=28)
    for each in (cache, plain):
        feed(model, each, tiny.tokens(48), 1)  # an eviction after 37 of them
        each.ring.rebase()
        feed(model, each, tiny.tokens(10, seed=4), 1)
        each.rollback(20)
    ours, full = (feed(model, each, tiny.tokens(26, seed=2), 1) for each in (cache, plain))
    assert (ours - full).std() < full.std() / 20


@pytest.mark.parametrize("count", [3, 20, 27, 32])
def test_dropping_by_hand_reaches_into_the_newest(model: Any, count: int) -> None:
    cache, plain = quantised(model), WindowCache(model, 36)
    for each in (cache, plain):
        feed(model, each, tiny.tokens(36), 1)
        assert each.evict(count) == (4, 4 + count)
        assert each.kept.tolist() == [*range(4), *range(4 + count, 36)]
    ours, full = (feed(model, each, tiny.tokens(80, seed=2), 1) for each in (cache, plain))
    assert cache.kept.tolist() == plain.kept.tolist()
    assert (ours - full).std() < full.std() / 10


@pytest.mark.parametrize("positions", [1, 1000])
def test_skipping_is_what_it_is_in_full_precision(positions: int) -> None:
    model = tiny.build("llama", max_position_embeddings=110)
    cache, plain = quantised(model), WindowCache(model, 36)
    for each in (cache, plain):
        feed(model, each, tiny.tokens(60), 1)
        each.skip(positions)
    ours, full = (feed(model, each, tiny.tokens(80, seed=2), 7) for each in (cache, plain))
    assert cache.kept.tolist() == plain.kept.tolist()
    assert (ours - full).std() < full.std() / 10


# Saved, and refused.


def test_a_state_is_of_the_precision_it_was_saved_in(model: Any) -> None:
    cache, plain = quantised(model), WindowCache(model, 36)
    for each in (cache, plain):
        feed(model, each, tiny.tokens(60), 1)
    with pytest.raises(SnapshotError, match="K and V in int8, and this cache keeps them in the model's precision"):
        WindowCache(model, 36).load(cache.state(HostMemory().copies()))
    with pytest.raises(SnapshotError, match="in the model's precision, and this cache keeps them in int8"):
        quantised(model).load(plain.state(HostMemory().copies()))


def test_what_cannot_be_kept_so_is_refused(model: Any) -> None:
    with pytest.raises(UnknownName, match=r"unknown kv_dtype 'int3'; known: int8; also accepted: None"):
        WindowCache(model, 36, kv_dtype="int3")
    with pytest.raises(UnsupportedCall, match="works under streaming-llm and sliding-window; under h2o every head"):
        WindowCache(model, 36, policy="h2o", kv_dtype="int8")
    assert WindowCache(model, 36, policy="sliding-window", kv_dtype="int8").ring.kv_dtype == "int8"
