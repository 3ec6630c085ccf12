"""The MLX engine beside its neighbours: the same tokens held, the same predictions, and what it refuses."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headwater.chat.session import Chat
from headwater.engines import ENGINES, mlx_library, open_engine
from headwater.engines.base import Engine
from headwater.errors import (
    BudgetError,
    CacheStateError,
    HeadwaterError,
    InputFileError,
    MissingExtra,
    ModelFileError,
    UnknownName,
    UnsupportedCall,
    UnsupportedModel,
    UnsupportedVersion,
    UsageError,
)
from headwater.policies import policy
from headwater.policies.window import Window
from tests import tiny_gguf
from tests.contract.conftest import byte_tokenizer
from tests.llamacpp import require_llamacpp
from tests.mlx import require_mlx

TEXT = np.random.default_rng(5).integers(0, 256, 1500).tolist()
SHARP = {"type_k": "f32", "type_v": "f32", "flash_attn": "off", "n_threads": 1}
Build = Callable[..., Any]


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """Make a model file and open it; the arguments are those of both."""
    require_mlx()

    def make(*, options: dict[str, Any] | None = None, **given: Any) -> Engine:
        file = tiny_gguf.write(tmp_path / "tiny.gguf", **given)
        return open_engine(str(file), engine="mlx", **(options or {}))

    return make


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """By how much the window's keys are turned, each time and layer."""
    require_mlx()
    from headwater.engines.mlx_cells import Cells

    seen: list[int] = []
    plain = Cells.turn

    def spy(self: Cells, start: int, by: int) -> None:
        seen.append(by)
        plain(self, start, by)

    monkeypatch.setattr(Cells, "turn", spy)
    return seen


def folder(path: Path, kind: str = "LlamaConfig", changes: dict[str, Any] | None = None, **config: Any) -> Path:
    """A random model and a tokenizer of bytes as transformers saves them; `changes` are made to its config.json."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 259,
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": 258,
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**{**sizes, **config}))
    model.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    if changes:
        written = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**written, **changes}))
    return path


def opened(path: Path, **options: Any) -> Any:
    return open_engine(str(path), engine="mlx", **options)


# Beside the other engines.


@pytest.mark.parametrize("window", [Window(budget=100, pins=4, block=64), Window(budget=40, block=1)], ids=str)
def test_it_holds_and_predicts_what_llama_cpp_does(build: Build, tmp_path: Path, window: Window):
    """Blocks of 64, after each of which llama.cpp closes the gap behind its pins, too."""
    require_llamacpp()
    engine = build(context_length=256)
    other = open_engine(str(tmp_path / "tiny.gguf"), engine="llamacpp", **SHARP)
    ours, theirs = engine.open(window), other.open(window)
    for token in TEXT[:300]:
        mine, yours = ours.feed([token]), theirs.feed([token])
        assert ours.kept.tolist() == theirs.kept.tolist()
        np.testing.assert_allclose(mine, yours, rtol=0, atol=1e-2)
    other.close()


def test_rotation_that_the_file_slows_down_by_pairs_is_llama_cpp_s(tmp_path: Path):
    """As Llama 3.1 has it: factors beside the weights."""
    require_mlx()
    require_llamacpp()
    factors = np.linspace(1, 8, 32)
    file = tiny_gguf.write(tmp_path / "slow.gguf", tensors={"rope_freqs.weight": factors})
    ours = opened(file).open(None)
    theirs = open_engine(str(file), engine="llamacpp", **SHARP).open(None)
    logits = ours.feed(TEXT[:90])
    np.testing.assert_allclose(logits, theirs.feed(TEXT[:90]), rtol=0, atol=2e-3)
    plain = opened(tiny_gguf.write(tmp_path / "plain.gguf"))
    assert np.abs(plain.open(None).feed(TEXT[:90]) - logits).max() > 0.1
    stream = opened(file).open(Window(budget=40, pins=4, block=4))
    stream.feed(TEXT[:60])  # the factors are found by the measurement, too


@pytest.mark.parametrize("kind", ["LlamaConfig", "Qwen2Config", "Qwen3Config"])
def test_a_folder_predicts_what_transformers_does(tmp_path: Path, kind: str):
    """With a rotary base that is not the default: some models of mlx-lm look for it where transformers 5 no longer
    writes it."""
    require_mlx()
    place = folder(tmp_path / "m", kind, rope_parameters={"rope_type": "default", "rope_theta": 50.0}, head_dim=16)
    window = Window(budget=40, pins=4, block=4)
    ours, theirs = opened(place).open(window), open_engine(str(place)).open(window)
    for start in range(0, 140, 35):
        mine, yours = ours.feed(TEXT[start : start + 35]), theirs.feed(TEXT[start : start + 35])
        assert ours.kept.tolist() == theirs.kept.tolist()
        np.testing.assert_allclose(mine, yours, rtol=0, atol=2e-3)


# When keys are turned.


def test_the_window_is_turned_only_when_positions_run_out(build: Build, turns: list[int]):
    engine = build(context_length=256)
    stream = engine.open(Window(budget=60, pins=4, block=4))
    stream.feed(TEXT[:250])
    assert turns == []
    stream.feed(TEXT[:406])  # 596 tokens left, and positions begin again after 196
    assert turns == [-196] * tiny_gguf.LAYERS * 3


def test_a_window_near_the_trained_length_is_turned_no_more_than_once_in_its_length(build: Build, turns: list[int]):
    engine = build(context_length=64)
    stream = engine.open(Window(budget=60, pins=4, block=1))
    stream.feed(TEXT[:460])
    assert turns == [-57] * tiny_gguf.LAYERS * 7


def test_pins_carry_one_rotation_however_many_tokens_left(build: Build):
    engine = build(context_length=256, options={"dtype": "bfloat16"})
    stream = engine.open(Window(budget=20, pins=4, block=1))
    stream.feed(TEXT[:200])
    stream.snapshot()  # puts everything where it belongs
    layer = stream._layers[1]
    expected = layer._turned(layer.pristine, stream._moved, layer.shape.rotation)
    assert stream._moved == 180
    np.testing.assert_array_equal(as_numpy(layer.keys[0][..., :4, :]), as_numpy(expected))


def test_without_reindexing_pins_stay_and_nothing_is_turned(build: Build, turns: list[int]):
    stream = build().open(Window(budget=20, pins=4, block=4), reindex=False)
    stream.feed(TEXT[:300])
    assert turns == [] and stream._layers[0].pristine is None


@pytest.mark.parametrize("positions", [1, 384, 1 << 20])
def test_a_gap_does_not_show(build: Build, positions: int):
    window = Window(budget=40, pins=4, block=4)
    engine = build()
    plain, moved = engine.open(window), engine.open(window)
    for stream in (plain, moved):
        stream.feed(TEXT[:90])
    moved.skip(positions)
    np.testing.assert_allclose(moved.feed(TEXT[90:130]), plain.feed(TEXT[90:130]), rtol=0, atol=2e-3)


# How keys and values are kept.


@pytest.mark.parametrize(
    ("options", "bits"),
    [({"kv_bits": 8}, 8 + 2 * 32 / 64), ({"dtype": "bfloat16"}, 16), ({"dtype": "float16"}, 16), ({}, 32)],
    ids=str,
)
def test_smaller_kinds_are_close_and_taken_up_to_the_bit(
    build: Build, tmp_path: Path, options: dict[str, Any], bits: float
):
    window = Window(budget=40, pins=4, block=4)
    exact = build().open(window).feed(TEXT[:120])
    engine = build(options=options)
    stream = engine.open(window)
    assert stream.nbytes == 41 * tiny_gguf.LAYERS * tiny_gguf.KV_HEADS * 2 * tiny_gguf.HEAD * bits / 8
    logits = np.concatenate([stream.feed(TEXT[:50])[:0], stream.feed(TEXT[50:120])])
    assert np.abs(logits - exact).mean() < 0.25
    stream.save(tmp_path / "s")
    again = engine.restore(tmp_path / "s", window)
    np.testing.assert_array_equal(again.logits, logits)
    for start in range(120, 160, 5):
        np.testing.assert_array_equal(again.stream.feed(TEXT[start : start + 5]), stream.feed(TEXT[start : start + 5]))
    assert again.stream.nbytes == stream.nbytes


def test_weights_and_kinds_of_keys_have_fingerprints_of_their_own(build: Build):
    prints = [
        build(seed=seed, options=options).fingerprint
        for seed, options in ((0, {}), (1, {}), (0, {"kv_bits": 8}), (0, {"dtype": "bfloat16"}), (0, {}))
    ]
    assert len(set(prints)) == 4 and prints[0] == prints[-1]


def test_a_stream_that_keeps_everything_grows(build: Build):
    engine = build(context_length=2048)
    stream, sizes = engine.open(None), list[int]()
    for start in range(0, 900, 100):
        stream.feed(TEXT[start : start + 100])
        sizes.append(stream.nbytes)
    assert [size // (sizes[0] // 256) for size in sorted(set(sizes))] == [256, 512, 1024]
    np.testing.assert_allclose(engine.open(None).feed(TEXT[:900]), stream._logits, rtol=0, atol=1e-3)


def test_a_pass_that_is_broken_off_leaves_the_stream_as_it_was(build: Build, monkeypatch: pytest.MonkeyPatch):
    engine = build()
    window = Window(budget=40, pins=4, block=4)
    plain, stream = engine.open(window), engine.open(window)
    for each in (plain, stream):
        each.feed(TEXT[:60])
    fetch, calls = type(stream._layers[0]).update_and_fetch, [0]

    def broken(self: Any, *given: Any) -> Any:
        calls[0] += 1
        if calls[0] == 2:
            raise KeyboardInterrupt
        return fetch(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(type(stream._layers[0]), "update_and_fetch", broken)
        with pytest.raises(KeyboardInterrupt):
            stream.feed(TEXT[60:63])
    assert stream.kept.tolist() == plain.kept.tolist()
    np.testing.assert_array_equal(stream.feed(TEXT[60:75]), plain.feed(TEXT[60:75]))


def test_conversations_in_threads(build: Build):
    engine = build()
    said: dict[int, np.ndarray] = {}

    def run(number: int) -> None:
        stream = engine.open(Window(budget=40, pins=4, block=4))
        for at in range(0, 140, 7):
            said[number] = stream.feed(TEXT[number + at : number + at + 7])

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    together = dict(said)
    for number in range(3):
        run(number)
        np.testing.assert_allclose(together[number], said[number], rtol=0, atol=1e-4)


def test_a_closed_engine_s_streams_say_so(build: Build):
    engine = build()
    stream = engine.open(None)
    engine.close()
    with pytest.raises(CacheStateError, match="the engine is closed"):
        stream.feed(TEXT[:5])


# What is refused.


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"dtype": "float64"}, UnknownName, "unknown dtype 'float64'; known: auto, bfloat16, float16, float32"),
        ({"kv_bits": 4}, UsageError, "kv_bits must be 0, for the model's own precision, or 8, got 4"),
        ({"n_threads": 2}, UnknownName, "unknown option of the engine mlx 'n_threads'; known: dtype, kv_bits"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_an_option_that_cannot_be_honoured_is_refused(
    build: Build, options: dict[str, Any], error: type[HeadwaterError], words: str
):
    with pytest.raises(error, match=words):
        build(options=options)


def test_heads_that_no_group_divides_are_refused_in_8_bits(build: Build):
    with pytest.raises(UsageError, match=r"kv_bits 8 needs heads of a multiple of 32 numbers, and .* 16 and 16"):
        build(head=16, options={"kv_bits": 8})
    assert build(head=32, options={"kv_bits": 8}).open(None).feed(TEXT[:9]).shape == (259,)


def test_a_policy_that_picks_in_every_head_is_refused_by_name(build: Build):
    engine = build()
    for name in ("random", "h2o"):
        with pytest.raises(UnsupportedCall, match=f"{name} keeps a set of its own in every head"):
            engine.open(policy(name, budget=100))
    with pytest.raises(HeadwaterError, match="h2o"):
        Chat.open(engine, policy="h2o", budget=100)


def test_layers_that_slide_by_themselves_are_refused_by_name(tmp_path: Path):
    require_mlx()
    sliding = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
    with pytest.raises(UnsupportedModel, match=r"layers 0 of .* keep a RotatingKVCache of mlx-lm's own"):
        opened(folder(tmp_path / "m", changes=sliding))


def test_a_rotation_that_changes_with_the_length_is_refused_and_runs_without_evicting(tmp_path: Path):
    require_mlx()
    dynamic = {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "rope_theta": 1e4}
    engine = opened(folder(tmp_path / "m", changes=dynamic))
    with pytest.raises(UnsupportedModel, match=r"\(dynamic\).* take the policy full"):
        engine.open(Window(budget=40, pins=4))
    stream = engine.open(None)
    stream.feed(TEXT[:20])
    assert stream.held == 20


def test_learned_positions_are_refused_by_the_measurement():
    require_mlx()
    from mlx_lm.models import gpt2

    from headwater.engines.mlx_examined import examine, require_eviction

    sizes = {"n_ctx": 64, "n_embd": 32, "n_head": 2, "n_layer": 2, "n_positions": 64}
    model = gpt2.Model(gpt2.ModelArgs(model_type="gpt2", layer_norm_epsilon=1e-5, vocab_size=50, **sizes))
    with pytest.raises(UnsupportedModel, match="layer 0 of it moves its keys in a way that no known rotation explains"):
        require_eviction(examine(model, "it", 50))


def _cut(file: Path, stop: int) -> None:
    tiny_gguf.write(file)
    file.write_bytes(file.read_bytes()[:stop])


BAD_FILES: dict[str, tuple[Callable[[Path], object], type[HeadwaterError], str]] = {
    "missing": (lambda file: None, InputFileError, "no such file"),
    "another kind": (lambda file: file.write_bytes(b"PK\3\4zip"), UsageError, "is not a GGUF file; MLX reads a folder"),
    "empty": (lambda file: file.write_bytes(b""), UsageError, "is not a GGUF file"),
    "cut in the header": (lambda file: _cut(file, 200), ModelFileError, "cannot be loaded by MLX: .* past the end"),
    "cut in the weights": (lambda file: _cut(file, -5000), ModelFileError, "ffn_down.* past the end of the file"),
    "unknown architecture": (
        lambda file: tiny_gguf.write(file, architecture="wonder"),
        UnsupportedModel,
        "architecture 'wonder', which is not read from GGUF here; known: llama, qwen2, qwen3",
    ),
    "recurrent": (lambda file: tiny_gguf.write(file, architecture="mamba"), UnsupportedModel, "architecture 'mamba'"),
    "fewer rows than tokens": (
        lambda file: tiny_gguf.write(file, rows=200),
        ModelFileError,
        "has weights for 200 tokens and a vocabulary of 259",
    ),
    "more rows than tokens": (lambda file: tiny_gguf.write(file, rows=300), ModelFileError, "has weights for 300"),
    "another rotation": (
        lambda file: tiny_gguf.write(file, facts={"rope.scaling.type": "yarn"}),
        UnsupportedModel,
        "scales its rotation by 'yarn'",
    ),
    "a part of the head turns": (
        lambda file: tiny_gguf.write(file, rotary=32),
        UnsupportedModel,
        "turns 32 of the 64 numbers",
    ),
    "weights of another kind": (
        lambda file: tiny_gguf.write(file, tensors={"blk.0.attn_gate.weight": np.ones((4, 4))}),
        UnsupportedModel,
        "has weights named 'blk.0.attn_gate.weight'",
    ),
    "an unknown way to split": (
        lambda file: tiny_gguf.write(file, split="wondrous"),
        UnsupportedModel,
        "splits texts by 'wondrous'",
    ),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_file_that_is_no_model_is_refused(tmp_path: Path, name: str):
    require_mlx()
    make, error, words = BAD_FILES[name]
    file = tmp_path / "bad.gguf"
    make(file)
    with pytest.raises(error, match=words):
        opened(file)


def test_what_is_no_model_at_all_is_refused(tmp_path: Path):
    require_mlx()
    with pytest.raises(UsageError, match=r"has no config\.json; MLX reads a folder of safetensors"):
        opened(tmp_path)
    with pytest.raises(UsageError, match="is a hub id, and MLX reads a folder"):
        open_engine("owner/name", engine="mlx")
    with pytest.raises(UnknownName, match="unknown model 'nothing'; known: smollm2; also accepted: a folder"):
        open_engine("nothing", engine="mlx")


def test_a_folder_that_is_not_whole_is_refused(tmp_path: Path):
    require_mlx()
    with pytest.raises(UnsupportedModel, match="of a kind that mlx-lm does not run: Model type wonder not supported"):
        opened(folder(tmp_path / "kind", changes={"model_type": "wonder"}))
    place = folder(tmp_path / "m")
    (place / "model.safetensors").write_bytes((place / "model.safetensors").read_bytes()[:-500])
    with pytest.raises(ModelFileError, match="cannot be loaded by MLX"):
        opened(place)
    (place / "model.safetensors").unlink()
    with pytest.raises(ModelFileError, match="No safetensors found"):
        opened(place)
    with pytest.raises(ModelFileError, match="has weights for 200 tokens and a vocabulary of 259"):
        opened(folder(tmp_path / "small", vocab_size=200, eos_token_id=199))


def test_a_model_without_a_chat_template_says_how_to_give_one(build: Build):
    engine = build(template=None)
    with pytest.raises(UnsupportedModel, match="has no chat template; give one as Jinja text"):
        engine.render([{"role": "user", "content": "hi"}], open_answer=True)
    with pytest.raises(UnsupportedModel, match="--template FILE"):
        Chat.open(engine, budget=100)
    given = build(template=None, options={"template": "{{ messages[0].content }}!"})
    assert given.render([{"role": "user", "content": "hi"}], open_answer=True) == "hi!"


def test_a_trained_length_below_the_budget_is_refused(build: Build):
    with pytest.raises(BudgetError, match="trained for 128; lower the budget to 127"):
        Chat.open(build(context_length=128), budget=1024)


def test_no_room_for_the_pins_is_refused(build: Build):
    with pytest.raises(BudgetError, match=r"the system prompt takes \d+ tokens and the budget is 100"):
        Chat.open(build(context_length=512), system="long " * 40, budget=100)


def test_text_that_is_no_unicode_is_refused(build: Build):
    with pytest.raises(UsageError, match="not valid Unicode at character 1"):
        build().encode("a\ud800")


# Where it is not installed.


@pytest.mark.parametrize("package", ["mlx", "mlx-lm"])
def test_what_is_missing_is_told_with_the_command(monkeypatch: pytest.MonkeyPatch, package: str):
    """Nothing of it is imported before."""
    plain = mlx_library.find_spec
    gone = package.replace("-", "_")
    monkeypatch.setattr(mlx_library, "find_spec", lambda name: None if name == gone else plain(name) or True)
    assert ENGINES["mlx"]
    with pytest.raises(MissingExtra, match=rf"{package} is not installed; run: pip install 'headwater\[mlx\]'"):
        open_engine("smollm2", engine="mlx")


def test_mlx_without_its_other_half_is_told(monkeypatch: pytest.MonkeyPatch):
    """On Linux `pip install mlx` alone brings bindings and no library."""
    require_mlx()

    def fails() -> None:
        raise ImportError("libmlx.so: cannot open shared object file")

    monkeypatch.setattr(mlx_library, "_import_models", fails)
    with pytest.raises(UnsupportedVersion, match=r"cannot be imported: libmlx\.so.*headwater"):
        open_engine("smollm2", engine="mlx")


def test_files_may_still_be_opened_after_mlx_lm_was_imported():
    """It sets a limit of 2,048 for the whole process, and Headwater puts back what it can."""
    require_mlx()
    resource = pytest.importorskip("resource")
    import subprocess
    import sys

    code = (
        "import resource; before = resource.getrlimit(resource.RLIMIT_NOFILE)[0]\n"
        "from headwater.engines import mlx_library; mlx_library.core()\n"
        "after, most = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "assert after == before or after == most, (before, after, most)"
    )
    assert resource is not None
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def as_numpy(array: Any) -> np.ndarray:
    import mlx.core as mx

    return np.array(array.astype(mx.float32))
