"""Built kernels as files that travel: DIR/<recipe>/kernel.so with build.json beside it, checked when they are taken.

A recipe is the digest of what was asked for: source, flags, ABI header, architecture (see SurfaceBackend.recipe). What
it was made with (toolchain, versions of headers) and what came out (SHA-256 of the file) stand in build.json. So a
machine without a compiler finds by the recipe what another machine has built, and the verdict says with what. The
check is against damage and mix-ups; it is no signature: a user who may write to DIR may put any kernel there.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path

import msgspec

from pytest_klineage.errors import BadRecord
from pytest_klineage.files import written_beside
from pytest_klineage.records import SCHEMA_VERSION, Build, Code, KernelSource, from_json, to_json
from pytest_klineage.surfaces.base import Built, SurfaceFailure

LIBRARY = "kernel.so"
DESCRIPTION = "build.json"


class ArtifactRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What build.json says about the file beside it."""

    recipe: str
    source_digest: str
    surface: str
    platform: str
    sha256: str
    """Of the file, in hexadecimal."""
    build: Build
    file: str = LIBRARY
    schema_version: int = SCHEMA_VERSION


def publish(directory: Path, content: bytes, source: KernelSource, build: Build) -> Built:
    """Write a built kernel and its description into a directory, the description last. Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    record = ArtifactRecord(
        recipe=build.recipe, source_digest=source.digest, surface=source.surface.value, platform=build.platform,
        sha256=hashlib.sha256(content).hexdigest(), build=build,
    )  # fmt: skip
    _replace(directory / LIBRARY, content)
    _replace(directory / DESCRIPTION, msgspec.json.format(to_json(record), indent=2) + b"\n")
    return Built(artifact=directory / LIBRARY, build=build)


def read(directory: Path) -> tuple[ArtifactRecord, bytes] | None:
    """The description of a built kernel and the kernel's bytes; None without one.

    Raises SurfaceFailure (build_error.artifact) for one that does not match its description.
    """
    try:
        record = from_json((directory / DESCRIPTION).read_bytes(), ArtifactRecord)
        content = (directory / LIBRARY).read_bytes()
    except FileNotFoundError as error:
        if (directory / DESCRIPTION).exists():
            raise _refused(directory, f"{LIBRARY} is missing") from error
        return None
    except (OSError, BadRecord) as error:
        raise _refused(directory, str(error)) from error
    if (actual := hashlib.sha256(content).hexdigest()) != record.sha256:
        raise _refused(directory, f"{LIBRARY} has the SHA-256 {actual}, {DESCRIPTION} says {record.sha256}")
    return record, content


def cached(directory: Path) -> Built | None:
    """A built kernel of the build cache; None without one, or a damaged one."""
    with contextlib.suppress(SurfaceFailure):
        if (found := read(directory)) is not None:
            build = msgspec.structs.replace(found[0].build, seconds=0.0, cached=True)
            return Built(artifact=directory / LIBRARY, build=build)
    return None


def store(root: Path, built: Built, source: KernelSource) -> None:
    """Put a built kernel into a folder of artifacts. Raises SurfaceFailure when it cannot be written."""
    try:
        publish(root / built.build.recipe, built.artifact.read_bytes(), source, built.build)
    except OSError as error:
        message = f"the artifact cannot be written to {root} ({error}); set --klineage-artifacts to another folder"
        raise SurfaceFailure(Code.BUILD_IO, message) from error


def take(root: Path, recipe: str, source: KernelSource, cache: Path) -> Built | None:
    """A built kernel of a folder of artifacts, copied into the cache; None when the folder has none for this recipe.

    What is loaded is the copy, so that it cannot change after it was checked. Raises SurfaceFailure for one that does
    not match its description or the source.
    """
    directory = root / recipe
    if (found := read(directory)) is None:
        return None
    record, content = found
    if record.recipe != recipe or record.build.recipe != recipe or record.source_digest != source.digest:
        raise _refused(directory, f"{DESCRIPTION} describes another kernel")
    build = msgspec.structs.replace(record.build, seconds=0.0, cached=True, artifact=record.sha256)
    copy = cache / "artifacts" / record.sha256
    try:
        return publish(copy, content, source, build)
    except OSError as error:
        message = f"the build cache {cache} cannot be written ({error}); set --klineage-cache-dir"
        raise SurfaceFailure(Code.BUILD_IO, message) from error


def _refused(directory: Path, why: str) -> SurfaceFailure:
    return SurfaceFailure(Code.ARTIFACT, f"the artifact {directory} is refused: {why}")


def _replace(path: Path, content: bytes) -> None:
    """Write a file so that a reader sees all of it or the one before.

    One with this content stays: another judge may be running it, and a process's own file must not become a deleted
    one, which counts as foreign code.
    """
    if _has(path, content):
        return
    with written_beside(path, content, shared=True) as name:
        with contextlib.suppress(OSError):
            os.link(name, path)  # fails where somebody was faster
        if not _has(path, content):
            os.replace(name, path)


def _has(path: Path, content: bytes) -> bool:
    """Whether a file is there with this content."""
    try:
        return path.read_bytes() == content
    except OSError:
        return False
