"""Expert kernels on disk: experts/<operator>/<platform>-<surface>/expert.toml to records.

[kernel]                       operator, platform, surface
[variants.expert]              files (the first is compiled), entry, flags, techniques, label, platforms, operator
[variants.naive]               as many variants as there are; "expert" and "naive" are what suites ask for
[contract]                     what the kernel demands of its arguments; free text by topic
[provenance]                   where it comes from: author, licence, source
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import msgspec

from pytest_klineage.errors import UnknownName, UsageError
from pytest_klineage.records import KernelSource, SourceFile, Surface

EXPERT_FILE = "expert.toml"


class ExpertVariant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kernel of an expert's folder."""

    files: tuple[str, ...]
    """Relative to the folder; the first is compiled or imported."""
    entry: str = "run"
    flags: tuple[str, ...] = ()
    techniques: tuple[str, ...] = ()
    """What makes it fast, in the field's words."""
    label: str = ""
    """What tables call it; the variant's name when empty."""
    platforms: tuple[str, ...] = ()
    """Platforms that it can be built for; the folder's own when empty."""
    operator: str = ""
    """What it computes; the folder's operator when empty."""


class Expert(msgspec.Struct, frozen=True, kw_only=True):
    """The kernels of one operator, platform and surface."""

    operator: str
    platform: str
    surface: Surface
    directory: Path
    variants: dict[str, ExpertVariant]
    contract: dict[str, Any] = {}
    provenance: dict[str, Any] = {}

    @property
    def methods(self) -> tuple[str, ...]:
        """Names of the variants that compute the folder's operator."""
        return tuple(name for name, variant in self.variants.items() if variant.operator in ("", self.operator))

    def source(self, variant: str) -> KernelSource:
        """The source of one variant, read from disk. Raises UnknownName, or UsageError for an unreadable file."""
        if variant not in self.variants:
            raise UnknownName(f"variant of {self.directory}", variant, self.variants)
        chosen = self.variants[variant]
        files = tuple(SourceFile(name=Path(name).name, text=_read(self.directory / name)) for name in chosen.files)
        return KernelSource(
            surface=self.surface, files=files, entry=chosen.entry, flags=chosen.flags, label=chosen.label or variant
        )

    def platforms_of(self, variant: ExpertVariant) -> tuple[str, ...]:
        """Platforms that one of these kernels can be built for."""
        return variant.platforms or (self.platform,)


class _Kernel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    operator: str
    platform: str
    surface: Surface


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    kernel: _Kernel
    variants: dict[str, ExpertVariant]
    contract: dict[str, Any] = {}
    provenance: dict[str, Any] = {}


def read_expert(path: Path) -> Expert:
    """Read one expert.toml. Raises UsageError that names the file and what is wrong in it."""
    try:
        with path.open("rb") as file:
            parsed = msgspec.convert(tomllib.load(file), type=_File)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not TOML: {error}") from error
    except msgspec.ValidationError as error:
        raise UsageError(f"{path}: {error}") from error
    _check(path, parsed)
    return Expert(
        operator=parsed.kernel.operator,
        platform=parsed.kernel.platform,
        surface=parsed.kernel.surface,
        directory=path.parent,
        variants=dict(sorted(parsed.variants.items())),
        contract=parsed.contract,
        provenance=parsed.provenance,
    )


def find_experts(root: Path, platform: str | None = None) -> list[Expert]:
    """All experts under `root` (for one platform), sorted by operator, platform and surface. Raises UsageError."""
    found = [read_expert(path) for path in sorted(root.glob(f"*/*/{EXPERT_FILE}"))]
    chosen = [expert for expert in found if platform is None or expert.platform == platform]
    return sorted(chosen, key=lambda expert: (expert.operator, expert.platform, expert.surface.value))


def _check(path: Path, parsed: _File) -> None:
    kernel = parsed.kernel
    expected = (kernel.operator, f"{kernel.platform}-{kernel.surface.value}")
    if path.parent.parts[-2:] != expected:
        raise UsageError(f"{path} says it is {'/'.join(expected)}; the folder's name must say the same")
    if not parsed.variants:
        raise UsageError(f"{path} has no [variants.NAME]")
    for name, variant in parsed.variants.items():
        if not variant.files:
            raise UsageError(f"{path}: variants.{name} has no files")
    for file in (file for variant in parsed.variants.values() for file in variant.files):
        if Path(file).is_absolute() or ".." in Path(file).parts:
            raise UsageError(f"{path}: {file} must lie in the expert's own folder")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the kernel source {path} cannot be read: {error}") from error
