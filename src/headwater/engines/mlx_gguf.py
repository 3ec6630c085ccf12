"""From a GGUF file to a model of mlx-lm: names, settings and the tokenizer, read from the file itself.

Knows the architectures in `MAPS`, and how llama.cpp's converters lay out their weights. Weights stay in the file's
blocks where MLX has them (Q4_0, Q4_1, Q8_0). Does not know caches or streams.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from headwater.errors import ModelFileError, UnsupportedModel

GROUP = 32
"""Numbers in a block of the kinds that MLX keeps."""

_COMMON = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Map:
    """An architecture: the names of its layers' parts, and whether its rotary pairs lie side by side in the file."""

    parts: Mapping[str, str]
    interleaved: bool


MAPS: dict[str, Map] = {
    "llama": Map(parts=_COMMON, interleaved=True),
    "qwen2": Map(parts=_COMMON, interleaved=False),
    "qwen3": Map(
        parts=_COMMON | {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}, interleaved=False
    ),
}

PLAIN_SPLITS = frozenset({"gpt-2", "gpt2", "smollm", "default"})
"""Ways to split a text before merging, by llama.cpp's names, that are GPT-2's as far as this vocabulary goes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What was in a file."""

    model: Any
    tokenizer: Any
    template: str | None
    context_length: int
    stop_tokens: frozenset[int]
    architecture: str
    rotary: Mapping[str, Any]


def read_gguf(file: Path, name: str) -> Parts:
    """The model in a file. Raises ModelFileError for one that is cut short, damaged or incomplete, UnsupportedModel for
    an architecture or a vocabulary that cannot be read here."""
    try:
        loaded: Any = mx.load(str(file), format="gguf", return_metadata=True)
        weights, raw = loaded
        mx.eval(weights)
    except (RuntimeError, ValueError) as error:
        raise ModelFileError(f"{name} cannot be loaded by MLX: {first_line(error)}") from error
    facts = {key: _plain(value) for key, value in raw.items()}
    try:
        return _assembled(weights, facts, name)
    except KeyError as error:
        raise ModelFileError(f"{name} lacks {error.args[0]!r}: it is not a whole model") from error


def _assembled(weights: dict[str, Any], facts: Mapping[str, Any], name: str) -> Parts:
    architecture = facts["general.architecture"]
    if architecture not in MAPS:
        raise UnsupportedModel(
            f"{name} is of the architecture {architecture!r}, which is not read from GGUF here; known: "
            f"{', '.join(sorted(MAPS))}; give the model as a folder of safetensors, or take the engine llamacpp"
        )
    known = MAPS[architecture]

    def fact(key: str, default: Any = None) -> Any:
        value = facts.get(f"{architecture}.{key}", default)
        if value is None:
            raise KeyError(f"{architecture}.{key}")
        return value

    tokens = facts["tokenizer.ggml.tokens"]
    rows = weights["token_embd.weight"].shape[0]
    if rows != len(tokens):
        raise ModelFileError(
            f"{name} has weights for {rows} tokens and a vocabulary of {len(tokens)}: its parts are of different models"
        )
    factors = weights.pop(_FACTORS, None)
    heads, width = fact("attention.head_count"), fact("embedding_length")
    arguments = {
        "model_type": architecture,
        "hidden_size": width,
        "num_hidden_layers": fact("block_count"),
        "intermediate_size": fact("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": fact("attention.head_count_kv", heads),
        "head_dim": fact("attention.key_length", width // heads),
        "rms_norm_eps": fact("attention.layer_norm_rms_epsilon"),
        "vocab_size": rows,
        "max_position_embeddings": fact("context_length"),
        "rope_theta": fact("rope.freq_base", 10000.0),
        "rope_traditional": known.interleaved,
        "rope_scaling": _scaling(facts, architecture, name),
        "tie_word_embeddings": "output.weight" not in weights,
        "attention_bias": any(key.endswith("attn_q.bias") for key in weights),
    }
    _check_rotary(facts, architecture, arguments["head_dim"], name)
    module = import_module(f"mlx_lm.models.{architecture}")
    model = module.Model(module.ModelArgs.from_dict(arguments))
    _fill(model, {_renamed(key, known, name): value for key, value in weights.items()}, name)
    if factors is not None:
        _scale_frequencies(model, np.array(factors, dtype=np.float64), arguments)
    return Parts(
        model=model,
        tokenizer=_tokenizer(facts, architecture, name),
        template=facts.get("tokenizer.chat_template"),
        context_length=arguments["max_position_embeddings"],
        stop_tokens=_stops(facts),
        architecture=architecture,
        rotary={"rope_theta": arguments["rope_theta"], "rope_scaling": arguments["rope_scaling"]},
    )


def _renamed(key: str, known: Map, name: str) -> str:
    places = key.split(".")
    if places[0] == "blk" and len(places) == 4 and places[2] in known.parts:
        return f"model.layers.{places[1]}.{known.parts[places[2]]}.{places[3]}"
    if places[0] in _WHOLE and len(places) == 2:
        return f"{_WHOLE[places[0]]}.{places[1]}"
    raise UnsupportedModel(f"{name} has weights named {key!r}, which this kind of model has not in mlx-lm")


def _fill(model: Any, weights: dict[str, Any], name: str) -> None:
    def packed(path: str, module: Any) -> bool | dict[str, int]:
        if f"{path}.scales" not in weights or not hasattr(module, "to_quantized"):
            return False
        bits = weights[f"{path}.weight"].shape[-1] * 32 // (weights[f"{path}.scales"].shape[-1] * GROUP)
        return {"group_size": GROUP, "bits": bits}

    nn.quantize(model, group_size=GROUP, bits=4, class_predicate=packed)
    try:
        model.load_weights(list(weights.items()))
    except ValueError as error:
        raise ModelFileError(f"{name} does not hold the weights that it says it has: {first_line(error)}") from error


def _scaling(facts: Mapping[str, Any], architecture: str, name: str) -> dict[str, Any] | None:
    kind = facts.get(f"{architecture}.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind != "linear":
        raise UnsupportedModel(
            f"{name} scales its rotation by {kind!r}, which is not read from GGUF here; give the model as a folder of "
            "safetensors, or take the engine llamacpp"
        )
    return {"type": "linear", "factor": facts[f"{architecture}.rope.scaling.factor"]}


def _check_rotary(facts: Mapping[str, Any], architecture: str, head_dim: int, name: str) -> None:
    turned = facts.get(f"{architecture}.rope.dimension_count", head_dim)
    if turned != head_dim:
        raise UnsupportedModel(
            f"{name} turns {turned} of the {head_dim} numbers of a head, which is not read from GGUF here; give the "
            "model as a folder of safetensors, or take the engine llamacpp"
        )


class _Factored(nn.Module):
    """A rotation of which every pair is slowed down by a factor of its own."""

    def __init__(self, frequencies: Any, *, interleaved: bool) -> None:
        super().__init__()
        self._freqs, self._interleaved = frequencies, interleaved

    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        return mx.fast.rope(
            x,
            2 * self._freqs.size,
            traditional=self._interleaved,
            base=None,
            scale=1.0,
            offset=offset,
            freqs=self._freqs,
        )


def _scale_frequencies(model: Any, factors: Any, arguments: Mapping[str, Any]) -> None:
    pairs = np.arange(0, arguments["head_dim"], 2) / arguments["head_dim"]
    periods = mx.array((arguments["rope_theta"] ** pairs * factors).astype(np.float32))
    for layer in model.layers:
        layer.self_attn.rope = _Factored(periods, interleaved=arguments["rope_traditional"])


def _tokenizer(facts: Mapping[str, Any], architecture: str, name: str) -> Any:
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS, convert_gguf_tokenizer

    kind, split = facts["tokenizer.ggml.model"], facts.get("tokenizer.ggml.pre", "default")
    if kind == "gpt2" and split not in PLAIN_SPLITS and split not in GGUF_PRE_TOKENIZER_SPLITS:
        raise UnsupportedModel(
            f"{name} splits texts by {split!r}, which is not known here; give the model as a folder with its "
            "tokenizer.json, or take the engine llamacpp"
        )
    given = {
        "tokenizer_type": kind,
        "pre_tokenizer_type": split,
        "tokens": facts["tokenizer.ggml.tokens"],
        "token_type": facts.get("tokenizer.ggml.token_type"),
    }
    if (scores := facts.get("tokenizer.ggml.scores")) is not None:
        given["scores"] = scores
    if (merges := facts.get("tokenizer.ggml.merges")) is not None:  # of a pair that is no token nothing is ever merged
        tokens = set(given["tokens"])
        given["merges"] = [pair for pair in merges if pair.replace(" ", "", 1) in tokens]
    try:
        backend, _ = convert_gguf_tokenizer(architecture, given)
    except Exception as error:  # a reader of other people's files can raise anything
        raise ModelFileError(f"{name} has a vocabulary that cannot be read: {first_line(error)}") from error
    special = {
        f"{kind}_token": facts["tokenizer.ggml.tokens"][number]
        for kind in ("bos", "eos")
        if (number := facts.get(f"tokenizer.ggml.{kind}_token_id")) is not None
    }
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def _stops(facts: Mapping[str, Any]) -> frozenset[int]:
    named = (facts.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom"))
    return frozenset(int(number) for number in named if number is not None)


def _plain(value: Any) -> Any:
    """A value of the metadata as Python's own."""
    return value.tolist() if isinstance(value, mx.array) else value


def first_line(error: Exception) -> str:
    """What an error of somebody else's says, in one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
