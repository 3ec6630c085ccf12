"""Watched attention of transformers models: what eager attention returns, for every family, and nothing left behind."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from headwater.engines import attention
from headwater.engines.transformers import TransformersEngine
from headwater.errors import UnsupportedCall, UsageError
from tests import tiny

TOKENS = 100
IDS = tiny.tokens(TOKENS)


class NoTokenizer:
    chat_template, eos_token_id = None, None

    def get_vocab(self) -> dict[str, int]:
        return {}


def engine(model: Any) -> TransformersEngine:
    return TransformersEngine(model, NoTokenizer(), name="tiny")


def calm(model: Any) -> Any:
    """With smaller weights, so that rounding does not grow from layer to layer and 1e-6 can be asked of float32."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(0.5)
    return model


@torch.inference_mode()
def eager(model: Any, ids: Tensor = IDS) -> np.ndarray:
    """What the model itself says it paid, `[layers, heads, tokens, positions]`."""
    model.set_attn_implementation("eager")
    returned = model(input_ids=ids, output_attentions=True, use_cache=False).attentions
    return torch.stack(returned)[:, 0].float().numpy()


def watched(opened: TransformersEngine, ids: Tensor = IDS, **options: Any) -> np.ndarray:
    tokens = ids[0].tolist()
    blocks = list(opened.attention(tokens, **options))
    whole = np.zeros((*blocks[0].weights.shape[:2], len(tokens), len(tokens)), dtype=blocks[0].weights.dtype)
    for block in blocks:
        whole[:, :, block.first : block.first + block.weights.shape[2], : block.weights.shape[3]] = block.weights
    return whole


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_weights_are_those_of_eager_attention(family: str):
    expected = eager(calm(tiny.build(family, attention="eager")))
    assert expected.max(axis=-1).mean() > 0.05, "attention so flat proves little"
    opened = engine(calm(tiny.build(family)))
    assert opened.attention_heads() == expected.shape[:2]
    way = attention._as_returned if family == "bloom" else attention._through_the_interface
    assert cast(Any, opened._watcher)._way is way
    for block in (1, 7, 64, TOKENS):
        np.testing.assert_allclose(watched(opened, block=block), expected, rtol=0, atol=1e-6, err_msg=str(block))


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "cohere2", "gpt_oss", "mistral-sliding"])
def test_a_sliding_layer_pays_nothing_before_its_window(family: str):
    """With every token in a block of its own, the cache of such a layer has let the oldest go."""
    opened = engine(tiny.build(family))
    window = opened.model.config.sliding_window
    whole = watched(opened, block=1)
    assert not np.tril(whole[0], -window).any()
    assert np.tril(whole[0], 1 - window).any()


def test_learned_sinks_take_their_share_of_the_mass():
    whole = watched(engine(tiny.build("gpt_oss")))
    sums = whole.sum(axis=-1)
    assert sums.max() < 1
    assert sums.min() < 0.9


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "bloom"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_of_low_precision_are_watched(family: str, dtype: torch.dtype):
    model = calm(tiny.build(family, dtype=dtype))
    whole = watched(engine(model), block=16)
    np.testing.assert_allclose(whole, eager(model), rtol=0, atol=0.05)


def test_a_run_that_starts_later_reads_the_beginning_as_the_model_does():
    """More tokens before the start than go in one forward pass."""
    model = calm(tiny.build("llama", max_position_embeddings=2048))
    ids = tiny.tokens(1200)
    expected = eager(calm(tiny.build("llama", max_position_embeddings=2048)), ids)[:, :, 1150:]
    np.testing.assert_allclose(watched(engine(model), ids, start=1150)[:, :, 1150:], expected, rtol=0, atol=1e-6)


# What else is done with the model.


def logits(model: Any) -> Tensor:
    with torch.inference_mode():
        return model(input_ids=IDS).logits


def traces_left(model: Any) -> list[str]:
    """What a run could have left on a model."""
    found = [f"implementation {model.config._attn_implementation}"] * (model.config._attn_implementation != "sdpa")
    for name, module in model.named_modules():
        hooks = {**module._forward_hooks, **module._forward_pre_hooks}
        found += [f"hook on {name}"] * bool(hooks)
        found += [f"{name}.{each}" for each in vars(module) if "headwater" in each or "watch" in each]
    return found


def finished(opened: TransformersEngine) -> None:
    list(opened.attention(IDS[0].tolist(), block=30))


def abandoned(opened: TransformersEngine) -> None:
    run = opened.attention(IDS[0].tolist(), block=30)
    next(run)
    del run
    gc.collect()


def suspended(opened: TransformersEngine) -> Iterator[Any]:
    run = opened.attention(IDS[0].tolist(), block=30)
    next(run)
    return run


def never_begun(opened: TransformersEngine) -> None:
    opened.attention(IDS[0].tolist())


def failed(opened: TransformersEngine) -> None:
    layer = opened.model.model.layers[2]

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    handle = layer.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        list(opened.attention(IDS[0].tolist()))
    handle.remove()


@pytest.mark.parametrize("use", [finished, abandoned, suspended, never_begun, failed])
def test_nothing_is_left_on_the_model(use: Callable[[TransformersEngine], object]):
    model = tiny.build("llama")
    before = logits(model)
    opened = engine(model)
    opened.attention_heads()
    held = use(opened)
    assert traces_left(model) == []
    assert torch.equal(logits(model), before)
    assert attention._sink.get() is None
    del held


def test_a_model_with_a_failed_run_behind_it_is_watched_as_before():
    opened = engine(tiny.build("llama"))
    before = watched(opened)
    failed(opened)
    np.testing.assert_array_equal(watched(opened), before)


def test_two_engines_on_one_model_do_not_see_each_other():
    model = tiny.build("qwen3")
    one, two = engine(model), engine(model)
    others = tiny.tokens(TOKENS, seed=9)
    expected, expected_other = watched(one, block=10), watched(two, others, block=10, layers=[2])
    runs = one.attention(IDS[0].tolist(), block=10), two.attention(others[0].tolist(), block=10, layers=[2])
    for block, other in zip(*runs, strict=True):
        at = slice(block.first, block.first + 10)
        np.testing.assert_array_equal(block.weights, expected[:, :, at, : at.stop])
        np.testing.assert_array_equal(other.weights, expected_other[:, :, at, : at.stop])


def test_the_rest_of_the_program_may_run_the_model_while_it_is_watched():
    """A call from inside the forward pass, as another thread makes it: it is right, and its weights go nowhere."""
    model = tiny.build("llama")
    expected, before = watched(engine(model)), logits(model)
    inside = list[Tensor]()

    def call(*_: Any) -> None:
        if not inside:
            inside.append(torch.empty(0))
            thread = threading.Thread(target=lambda: inside.append(logits(model)))
            thread.start()
            thread.join()

    opened = engine(model)
    opened.attention_heads()
    handle = model.model.layers[1].register_forward_pre_hook(call)
    try:
        np.testing.assert_array_equal(watched(opened), expected)
    finally:
        handle.remove()
    torch.testing.assert_close(inside[1], before, rtol=0, atol=1e-4)


def test_two_threads_that_watch_one_model_see_their_own():
    """The second one used to take the switched implementation for the model's own, and left it behind."""
    model = tiny.build("llama")
    texts = [tiny.tokens(TOKENS, seed=seed) for seed in range(4)]
    expected = [watched(engine(model), text, block=5) for text in texts]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda text: watched(engine(model), text, block=5), texts))
    np.testing.assert_array_equal(found, expected)
    assert traces_left(model) == []


@pytest.mark.parametrize("mask", ["none", "bool"])
def test_masks_of_another_implementation_are_understood(mask: str):
    """A forward pass that began before the switch hands over the mask that it was given."""
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    visible = torch.ones(5, 9, dtype=torch.bool).tril(4)
    given = None if mask == "none" else visible[None, None]
    module = cast(Any, torch.nn.Module())
    ours, _ = attention.watched_attention(module, query, key, value, given)
    theirs = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=visible, enable_gqa=True)
    torch.testing.assert_close(ours, theirs.transpose(1, 2))


# What can be watched.


def hybrid() -> Any:
    """Every second layer is linear."""
    config = transformers.Qwen3NextConfig(
        vocab_size=tiny.VOCAB,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        layer_types=["linear_attention", "full_attention", "linear_attention", "full_attention"],
    )
    torch.manual_seed(0)
    return transformers.Qwen3NextForCausalLM(config).eval()


def test_layers_without_softmax_attention_are_left_out_and_the_others_keep_their_numbers():
    opened = engine(hybrid())
    assert opened.attention_layers() == (1, 3)
    assert opened.attention_heads() == (2, 4)
    whole = watched(opened, block=16)
    np.testing.assert_allclose(whole.sum(axis=-1), 1, atol=1e-5)
    np.testing.assert_allclose(watched(opened, layers=[3], block=16)[0], whole[1], atol=1e-6)
    with pytest.raises(UsageError, match="there is no layer 0 to watch; tiny shows layers 1, 3"):
        opened.attention([1, 2], layers=[0])


def test_a_stream_over_such_a_model_can_be_closed():
    """Its own cache zeroes recurrent layers in place, which torch refused outside of inference mode."""
    stream = engine(hybrid()).open(None)
    stream.feed([5, 6, 7])
    stream.close()
    assert stream.nbytes == 0


def test_a_model_without_any_attention_is_refused():
    config = transformers.MambaConfig(vocab_size=tiny.VOCAB, hidden_size=32, num_hidden_layers=2, state_size=4)
    opened = engine(transformers.MambaForCausalLM(config).eval())
    with pytest.raises(UnsupportedCall, match=r"tiny \(MambaForCausalLM\) does not show its attention"):
        opened.attention_heads()
    with pytest.raises(UnsupportedCall, match="does not show its attention"):
        opened.attention([1, 2])


def test_weights_that_are_returned_for_some_layers_only_are_nobodys():
    model = tiny.build("bloom")
    model.config.num_hidden_layers = 5
    with pytest.raises(UnsupportedCall, match="does not show its attention"):
        engine(model).attention_heads()


def test_attention_that_ours_does_not_reproduce_is_not_shown(monkeypatch: pytest.MonkeyPatch):
    """A model that means something by an argument that our function does not know must not be watched wrongly."""
    opened = engine(tiny.build("gemma2"))

    def without_softcap(*args: Any, softcap: float | None = None, **kwargs: Any):
        return attention_function(*args, **kwargs)

    attention_function = attention.watched_attention
    interface = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    opened.attention_heads()  # registers
    monkeypatch.setitem(interface._global_mapping, attention.NAME, without_softcap)
    opened.model.model.layers[0].self_attn.attn_logit_softcapping = 0.05
    fresh = engine(opened.model)
    fresh.attention_heads()
    assert cast(Any, fresh._watcher)._way is attention._as_returned


def test_nothing_is_registered_with_transformers_by_an_import():
    """Importing the engine changes nothing in the host library; only watching does."""
    program = (
        "import headwater.engines.transformers, headwater.engines.attention as a\n"
        "from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as f\n"
        "assert a.NAME not in f.valid_keys()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


# On the real model.


@pytest.mark.real_model
def test_smollm2_is_watched_as_eager_attention_says():
    opened = TransformersEngine.load("smollm2")
    assert opened.attention_heads() == (30, 9)
    tokens = opened.encode("The tide had gone out so far that the boats lay on the sand. " * 6)
    ids = torch.tensor([tokens])
    whole = watched(opened, ids, block=32)
    opened.model.set_attn_implementation("sdpa")
    expected = eager(opened.model, ids)
    np.testing.assert_allclose(whole, expected, rtol=0, atol=1e-4)
    assert whole[5:, :, 20:, 0].mean() > 0.2, "the first token is a sink"
    opened.close()
