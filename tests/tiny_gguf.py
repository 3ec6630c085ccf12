"""Random models of two layers in GGUF files, with a tokenizer of single bytes and a ChatML template."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LAYERS, HEADS, KV_HEADS, HEAD, FEED = 2, 2, 1, 64, 96
CONTROLS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCABULARY = 256 + len(CONTROLS)
NORMAL, CONTROL = 1, 3
STATE, RANK, CONVOLUTION = 8, 4, 4

Shapes = dict[str, tuple[int, ...]]

FACTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "qwen2vl": {"rope.dimension_sections": [8, 12, 12, 0]},
    "gemma3": {
        "attention.sliding_window": 16,
        "attention.sliding_window_pattern": 2,
        "attention.key_length": HEAD,
        "attention.value_length": HEAD,
    },
    "gpt2": {"attention.layer_norm_epsilon": 1e-5},
    "mamba": {
        "ssm.conv_kernel": CONVOLUTION,
        "ssm.inner_size": 4 * HEAD,
        "ssm.state_size": STATE,
        "ssm.time_step_rank": RANK,
    },
}
"""What an architecture says of itself beside what all do."""


def byte_letters() -> list[str]:
    """The letters that stand for the bytes, byte 0 first, as byte-level tokenizers write them."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in shown}
    hidden = [byte for byte in range(256) if byte not in letters]
    letters |= {byte: chr(256 + index) for index, byte in enumerate(hidden)}
    return [letters[byte] for byte in range(256)]


def write(
    path: Path,
    *,
    context_length: int = 128,
    architecture: str = "llama",
    template: str | None = CHATML,
    head: int = HEAD,
    spread: float = 0.3,
    seed: int = 0,
    facts: Mapping[str, Any] | None = None,
    rows: int = VOCABULARY,
    tensors: Mapping[str, np.ndarray] | None = None,
    rotary: int | None = None,
    split: str = "smollm",
) -> Path:
    """Write it to `path`. `facts` are further metadata of the architecture; `rows` is how many tokens have weights,
    `tensors` what there is beside them; `rotary` of a head's numbers turn; `split` is how texts are split."""
    import gguf

    random = np.random.default_rng(seed)
    width, tokens = HEADS * head, [*byte_letters(), *CONTROLS]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(context_length)
    writer.add_embedding_length(width)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS if architecture == "gpt2" else KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(rotary or head)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    writer.add_token_types([NORMAL] * 256 + [CONTROL] * len(CONTROLS))
    writer.add_token_merges([f"{tokens[0]} {tokens[1]}"])  # of a pair that is no token: nothing is ever merged
    writer.add_eos_token_id(258)
    writer.add_add_bos_token(False)
    if template is not None:
        writer.add_chat_template(template)
    adds = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32, list: writer.add_array}
    for key, value in {**FACTS.get(architecture, {}), **(facts or {})}.items():
        adds[type(value)](f"{architecture}.{key}", value)
    for name, shape in _shapes(architecture, width, head, rows, context_length).items():
        plain = name.endswith("norm.weight") or len(shape) == 1
        weights = np.ones(shape) if plain else random.normal(0, spread, shape)
        weights = -weights if name.endswith("ssm_a") else np.zeros(shape) if name.endswith("bias") else weights
        writer.add_tensor(name, weights.astype(np.float32))
    for name, numbers in (tensors or {}).items():
        writer.add_tensor(name, numbers.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _shapes(architecture: str, width: int, head: int, rows: int, context_length: int) -> Shapes:
    shapes: Shapes = {"token_embd.weight": (rows, width), "output_norm.weight": (width,)}
    if architecture == "gpt2":
        shapes |= {"position_embd.weight": (context_length, width), "output_norm.bias": (width,)}
    layer = {"mamba": _recurrent, "gpt2": _learned}.get(architecture)
    each = layer(width) if layer is not None else _attending(width, head, normed=architecture == "gemma3")
    return shapes | {f"blk.{index}.{name}": shape for index in range(LAYERS) for name, shape in each.items()}


def _attending(width: int, head: int, *, normed: bool) -> Shapes:
    shapes: Shapes = {
        "attn_norm.weight": (width,),
        "attn_q.weight": (width, width),
        "attn_k.weight": (KV_HEADS * head, width),
        "attn_v.weight": (KV_HEADS * head, width),
        "attn_output.weight": (width, width),
        "ffn_norm.weight": (width,),
        "ffn_gate.weight": (FEED, width),
        "ffn_up.weight": (FEED, width),
        "ffn_down.weight": (width, FEED),
    }
    if normed:
        shapes |= {"post_attention_norm.weight": (width,), "post_ffw_norm.weight": (width,)}
        shapes |= {"attn_q_norm.weight": (head,), "attn_k_norm.weight": (head,)}
    return shapes


def _learned(width: int) -> Shapes:
    shapes: Shapes = {
        "attn_qkv.weight": (3 * width, width),
        "attn_output.weight": (width, width),
        "ffn_up.weight": (FEED, width),
        "ffn_down.weight": (width, FEED),
        "attn_norm.weight": (width,),
        "ffn_norm.weight": (width,),
    }
    return shapes | {name.replace("weight", "bias"): shape[:1] for name, shape in shapes.items()}


def _recurrent(width: int) -> Shapes:
    inner = 2 * width
    return {
        "attn_norm.weight": (width,),
        "ssm_in.weight": (2 * inner, width),
        "ssm_conv1d.weight": (inner, CONVOLUTION),
        "ssm_conv1d.bias": (inner,),
        "ssm_x.weight": (RANK + 2 * STATE, inner),
        "ssm_dt.weight": (inner, RANK),
        "ssm_dt.bias": (inner,),
        "ssm_a": (inner, STATE),
        "ssm_d": (inner,),
        "ssm_out.weight": (width, inner),
    }
