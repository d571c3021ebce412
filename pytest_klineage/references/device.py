"""What references on a GPU have in common: variants, the choice among them, versions."""

from __future__ import annotations

import importlib
import importlib.metadata
from abc import abstractmethod
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_klineage.errors import MissingDependency, UsageError
from pytest_klineage.records import GPU_PLATFORMS, KernelCase
from pytest_klineage.records.facts import COUNTED, MEASURED, NO_PART, SLOWER_SEARCH, VERSION_NOTE
from pytest_klineage.references.base import AS_FAST, Reference, TrialTensors, Variant
from pytest_klineage.references.choose import Choice, choose
from pytest_klineage.references.flags import forbid_tf32
from pytest_klineage.references.refusals import CANNOT_RUN, REFUSALS, UnsupportedCase, refuses

if TYPE_CHECKING:
    from pytest_klineage.references.base import Call

HALVES = ("fp16", "bf16")
"""The types of tensor cores that libraries of one purpose are written for."""
PINNED = {"flashinfer-python": "0.6.11", "fla-core": "0.5.0"}
"""By distribution, the version whose arguments and figures this project has checked."""
PARTLESS = ("absent", "variant_error")
"""How facts begin that say who took no part."""
NOT_INSTALLED = "is not installed"


class DeviceReference(Reference):
    """A library on a GPU. `prepare` takes the fastest of its variants; `describe` says which, and what all took."""

    platforms: ClassVar[tuple[str, ...]] = tuple(GPU_PLATFORMS)

    def __init__(self) -> None:
        self._choices: dict[str, Choice] = {}

    @abstractmethod
    def variants(self, case: KernelCase, trial: TrialTensors) -> dict[str, Variant]:
        """The ways in which this library computes a case, planned and ready to be called.

        Raises MissingDependency when the library is not installed.
        """

    def as_vendor(self) -> tuple[str, ...]:
        """Names of the operators for which the reference "vendor" asks it."""
        return self.operators()

    def countable(self, case: KernelCase) -> Collection[str] | None:
        """Names of the variants that a kernel for this case is compared with; None for all. Others are recorded."""
        return None

    @abstractmethod
    def versions(self) -> dict[str, str]:
        """Versions of what it calls, and flags in force, for the record."""

    def prepare(self, case: KernelCase, trial: TrialTensors | None = None) -> Call:
        """The fastest variant.

        Raises UsageError where there is no GPU, MissingDependency where there is no library, UnsupportedCase where the
        library refuses the case when it plans or runs it.
        """
        self.check(case, "cpu" if trial is None else trial.platform)
        if trial is None:
            raise UsageError(f"the reference {self.name} compares its variants on tensors of the case; give it a trial")
        if case.dtype == "fp32":
            forbid_tf32()
        choice = choose(self._planned(case, trial), trial, countable=self.countable(case))
        self._choices[case.id] = choice
        return choice.variant

    def _planned(self, case: KernelCase, trial: TrialTensors) -> dict[str, Variant]:
        try:
            return self.variants(case, trial)
        except REFUSALS as error:
            if not refuses(str(error)):
                raise
            raise UnsupportedCase(f"{type(error).__name__}: {error}") from error

    def label(self, case: KernelCase) -> str:
        """What tables call it."""
        return self.name

    def describe(self, case: KernelCase) -> dict[str, str]:
        """Label and versions, and once the case has been prepared: "variant" and "variant_ms.<name>"."""
        choice = self._choices.get(case.id)
        return {"label": self.label(case), **self.versions(), **(choice.facts() if choice else {})}


def imported(module: str, name: str, remedy: str) -> Any:
    """A library's function or class. Raises MissingDependency with the command that installs what is absent.

    What another version calls otherwise is absent too.
    """
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise MissingDependency(error.name or module, remedy) from error
    try:
        return getattr(found, name)
    except AttributeError as error:
        raise MissingDependency(f"{module}.{name}", remedy) from error


def pinned_version(distribution: str, name: str, remedy: str) -> dict[str, str]:
    """The installed version under `name`, and a note with the remedy when it is not the one that has been checked."""
    try:
        found = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        found = "unknown"
    if found == PINNED[distribution]:
        return {name: found}
    note = f"{name} {found} runs; {PINNED[distribution]} is the version that was checked, install it with: {remedy}"
    return {name: found, VERSION_NOTE: note}


def reference_notes(facts: Mapping[str, str]) -> list[str]:
    """What a reader must know of a reference: versions that were not checked, who failed to take part, bad luck."""
    notes = [said for key, said in facts.items() if key.partition(".")[0] == VERSION_NOTE]
    for key, said in facts.items():
        kind, _, name = key.partition(".")
        if kind in PARTLESS and failed(said):
            notes.append(f"{name} {NO_PART}, which may be faster with it: {said}")
    compared_ms, counted_ms = chosen_variant(facts)["variant_ms"], float(facts.get(MEASURED + COUNTED, 0.0))
    if counted_ms > AS_FAST * compared_ms > 0:
        times = f"{counted_ms:.5f} ms, {compared_ms:.5f} ms when it was compared"
        notes.append(f"the reference's search {SLOWER_SEARCH}: {times}; judge again")
    return notes


def failed(said: str) -> bool:
    """Whether it is a fault that keeps somebody out: not the case, not the platform, and not that it is not there."""
    return not (refuses(said) or said.startswith(CANNOT_RUN) or said.endswith(NOT_INSTALLED))


def chosen_variant(facts: Mapping[str, str]) -> dict[str, Any]:
    """What a process that is started later gets to know of the chosen variant: its name and median, by field."""
    name = facts.get("variant", "")
    return {"variant": name, "variant_ms": float(facts.get(MEASURED + name, 0.0))}


def torch_versions() -> dict[str, str]:
    """Versions of torch, CUDA and cuDNN, the GPU, and the flags that decide precision, for the record."""
    import torch

    matmul = torch.backends.cuda.matmul
    facts = {
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call] # torch has no types here
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "allow_bf16_reduced_precision_reduction": str(matmul.allow_bf16_reduced_precision_reduction),
        "allow_fp16_reduced_precision_reduction": str(matmul.allow_fp16_reduced_precision_reduction),
        "allow_fp16_accumulation": str(getattr(matmul, "allow_fp16_accumulation", False)),
        "cudnn_allow_tf32": str(torch.backends.cudnn.allow_tf32),
        "cudnn_deterministic": str(torch.backends.cudnn.deterministic),
        "deterministic_algorithms": str(torch.are_deterministic_algorithms_enabled()),
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts
