"""The vendor reference: of all libraries that are installed and have the operator, the fastest on this case."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import ClassVar

from pytest_klineage.errors import HarnessError, MissingDependency, UsageError
from pytest_klineage.records import KernelCase
from pytest_klineage.records.facts import VERSION_NOTE
from pytest_klineage.references.base import TrialTensors, Variant
from pytest_klineage.references.device import NOT_INSTALLED, DeviceReference
from pytest_klineage.references.refusals import REFUSALS, UnsupportedCase, refuses


class VendorReference(DeviceReference):
    """Variants are called "<library>.<variant>"; who could not take part is in the record with the reason."""

    name: ClassVar[str] = "vendor"
    remedy: ClassVar[str] = "pip install flashinfer-python==0.6.11 flash-linear-attention==0.5.0"

    def __init__(self, libraries: Sequence[DeviceReference]) -> None:
        super().__init__()
        self._libraries = {library.name: library for library in libraries}
        names = dict.fromkeys(name for library in libraries for name in library.as_vendor())
        self._members = {
            name: tuple(library.name for library in libraries if name in library.as_vendor()) for name in names
        }
        self._absent: dict[str, dict[str, str]] = {}
        self._asked: dict[str, tuple[str, ...]] = {}
        """By case, the libraries whose variants were made: at a restart the one that was chosen before."""

    def operators(self) -> tuple[str, ...]:
        return tuple(self._members)

    def asks(self, operator: str) -> tuple[str, ...]:
        return self._members[operator]

    def limits(self, case: KernelCase, platform: str) -> str:
        refused = {name: self._libraries[name].limits(case, platform) for name in self._members[case.operator]}
        return "" if not all(refused.values()) else "; ".join(f"{name}: {why}" for name, why in refused.items())

    def ahead(self, case: KernelCase) -> tuple[str, ...]:
        found = (self._libraries[name].ahead(case) for name in self._members[case.operator])
        return tuple(dict.fromkeys(module for modules in found for module in modules))

    def variants(self, case: KernelCase, trial: TrialTensors) -> dict[str, Variant]:
        found: dict[str, Variant] = {}
        absent = self._absent[case.id] = {}
        missing: dict[str, str] = {}
        members, chosen = self._members[case.operator], trial.only.partition(".")[0]
        asked = self._asked[case.id] = (chosen,) if chosen in members else members
        for name in asked:
            library = self._libraries[name]
            try:
                library.check(case, trial.platform)
                variants = library.variants(case, trial)
            except MissingDependency as error:
                absent[name] = f"{error.what} {NOT_INSTALLED}"
                missing[error.what] = library.remedy
            except (UsageError, *REFUSALS) as error:
                absent[name] = str(error)
            else:
                found |= {f"{name}.{variant}": made for variant, made in variants.items()}
        if not found and missing:
            raise MissingDependency(" or ".join(missing), " or: ".join(missing.values()))
        if not found:
            causes = "; ".join(f"{name}: {why}" for name, why in absent.items())
            kind = UnsupportedCase if all(map(refuses, absent.values())) else HarnessError
            raise kind(f"no library runs it: {causes}")
        return found

    def countable(self, case: KernelCase) -> Collection[str] | None:
        names: list[str] = []
        for name in self._members[case.operator]:
            own = self._libraries[name].countable(case)
            if own is None:
                return None
            names += (f"{name}.{variant}" for variant in own)
        return names

    def label(self, case: KernelCase) -> str:
        choice = self._choices.get(case.id)
        return f"vendor: {choice.name}" if choice else "vendor"

    def describe(self, case: KernelCase) -> dict[str, str]:
        """Also the versions of every library that was asked, and "absent.<library>" with the reason."""
        described, absent = super().describe(case), self._absent.get(case.id, {})
        for name in self._asked.get(case.id, self._members[case.operator]):
            if name not in absent:
                versions = self._libraries[name].versions()
                if note := versions.pop(VERSION_NOTE, ""):
                    described[f"{VERSION_NOTE}.{name}"] = note
                described |= versions
        return described | {f"absent.{name}": why for name, why in absent.items()}

    def versions(self) -> dict[str, str]:
        return {}
