"""The fastest of several variants: warmed up, timed in turns by CUDA events, chosen by median. Untimed preparation.

Sequential timings of identical code differ by several percent on a GPU at its power limit; taking turns puts all
variants under the same clocks.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from pytest_klineage.errors import HarnessError
from pytest_klineage.references.base import Trial, Variant
from pytest_klineage.references.flags import read_flags, write_flags

if TYPE_CHECKING:
    from pytest_klineage.references.base import Tensors

WARMUP_CALLS = 5
"""Untimed calls of every variant: loading, autotuning, searching and clocks come up here."""
REPS = 25
HEAD_START_CYCLES = 2_000_000
"""The device spins for about a millisecond before a call, so that the host has queued all of it by then."""
SPARE_FLUSH_BYTES = 256 << 20
"""Where torch does not say how large the L2 is: more than any so far."""
CAUSE_LENGTH = 200
"""Characters of an error that a record keeps."""

Timer: TypeAlias = Callable[[Callable[[], object]], float]
"""Runs what it is given once and says how many milliseconds it took."""


@dataclass(frozen=True)
class Choice:
    """The variant that is charged, and how all of them did."""

    name: str
    variant: Variant
    medians_ms: Mapping[str, float]
    """By variant, the median of its calls with a flushed L2."""
    failures: Mapping[str, str] = field(default_factory=dict)
    """By variant that cannot run this case, why."""

    def facts(self) -> dict[str, str]:
        """For the record: "variant", "variant_ms.<name>" and "variant_error.<name>"."""
        measured = {f"variant_ms.{name}": f"{median:.5f}" for name, median in self.medians_ms.items()}
        return {"variant": self.name, **measured, **{f"variant_error.{n}": why for n, why in self.failures.items()}}


class DeviceTimer:
    """Times one call at a time on the current stream of the current GPU, with a cold L2."""

    def __init__(self) -> None:
        import torch

        found = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "L2_cache_size", 0)
        self._flush = torch.empty(2 * found or SPARE_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
        new_event: Any = torch.cuda.Event
        self._start, self._stop = new_event(enable_timing=True), new_event(enable_timing=True)
        self._spin: Any = torch.cuda._sleep

    def __call__(self, run: Callable[[], object]) -> float:
        """Milliseconds on the device from the call's start to the end of what it queued."""
        self._spin(HEAD_START_CYCLES)
        self._flush.zero_()
        self._start.record()
        run()
        self._stop.record()
        self._stop.synchronize()
        return float(self._start.elapsed_time(self._stop))


def choose(
    variants: Mapping[str, Variant],
    trial: Trial,
    *,
    chargeable: Collection[str] | None = None,
    timer: Timer | None = None,
    reps: int = REPS,
) -> Choice:
    """The fastest variant that may be charged (default: any); the process is left with that variant's flags.

    A variant that raises RuntimeError or ValueError while it is warmed up is left out and recorded. Raises HarnessError
    when none is left that may be charged. Where the trial names one that was chosen before, that one is warmed up and
    taken.
    """
    if trial.only:
        return chosen_before(variants, trial)
    defaults = read_flags({name for variant in variants.values() for name in variant.flags})
    failures: dict[str, str] = {}
    ready: dict[str, Tensors] = {}
    for name, variant in variants.items():
        write_flags({**defaults, **variant.flags})
        try:
            ready[name] = warmed_up(variant, trial)
        except (RuntimeError, ValueError) as error:
            failures[name] = f"{type(error).__name__}: {error}"[:CAUSE_LENGTH]
    eligible = [name for name in ready if chargeable is None or name in chargeable]
    if not eligible:
        write_flags(defaults)
        causes = "; ".join(f"{name}: {why}" for name, why in failures.items()) or "there is none"
        raise HarnessError(f"no variant of the reference runs: {causes}")
    timer = timer or DeviceTimer()
    times: dict[str, list[float]] = {name: [] for name in ready}
    for _ in range(reps):
        for name, inputs in ready.items():
            write_flags({**defaults, **variants[name].flags})
            times[name].append(timer(partial(variants[name].call, inputs, trial.outputs)))
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    best = min(eligible, key=medians.__getitem__)
    write_flags({**defaults, **variants[best].flags})
    return Choice(best, variants[best], medians, failures)


def chosen_before(variants: Mapping[str, Variant], trial: Trial) -> Choice:
    """The variant that the trial names, warmed up under its flags. Raises HarnessError when there is none."""
    if trial.only not in variants:
        raise HarnessError(f"the reference has no variant {trial.only!r} any more; it has {', '.join(variants)}")
    variant = variants[trial.only]
    write_flags({**read_flags(set(variant.flags)), **variant.flags})
    warmed_up(variant, trial)
    return Choice(trial.only, variant, {})


def warmed_up(variant: Variant, trial: Trial) -> Tensors:
    """The trial's inputs in the variant's convention, after some calls with them have come to their end."""
    import torch

    inputs = trial.inputs if variant.convert is None else variant.convert(trial.inputs)
    for _ in range(WARMUP_CALLS):
        variant.call(inputs, trial.outputs)
    if trial.device.type == "cuda":
        torch.cuda.synchronize(trial.device)
    return inputs
