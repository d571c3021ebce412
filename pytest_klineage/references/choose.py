"""The fastest of several variants: warmed up, timed in turns by CUDA events, chosen by median. Untimed preparation.

Sequential timings of identical code differ by several percent on a GPU at its power limit; taking turns puts all
variants under the same clocks. Every variant has a thread of its own, and with it its own caches of its library.

A search that does not find the same every time is made several times, until the best that it found is found again.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from pytest_klineage.errors import HarnessError
from pytest_klineage.records.facts import COUNTED, MEASURED
from pytest_klineage.references.base import AS_FAST, TrialTensors, Variant
from pytest_klineage.references.flags import read_flags, write_flags
from pytest_klineage.references.refusals import REFUSALS, UnsupportedCase, refuses

if TYPE_CHECKING:
    import torch

    from pytest_klineage.references.base import Tensors

WARMUP_CALLS = 5
"""Untimed calls of every variant: loading, autotuning, searching and clocks come up here."""
REPS = 25
DRAWS = 4
"""Searches of a variant whose search is a matter of luck, when it is compared with others."""
MOST_DRAWS = 16
"""Searches at most in the thread that will call it, until it is as fast there."""
HEAD_START_CYCLES = 2_000_000
"""The device spins for about a millisecond before a call, so that the host has queued all of it by then."""
SPARE_FLUSH_BYTES = 256 << 20
"""Where torch does not say how large the L2 is: more than any so far."""
CAUSE_LENGTH = 200
"""Characters of an error that a record keeps."""

Timer: TypeAlias = Callable[[Callable[[], object]], float]
"""Runs what it is given once and says how many milliseconds it took."""
Result = TypeVar("Result")


@dataclass(frozen=True)
class Choice:
    """The variant that counts, and how all of them did."""

    name: str
    variant: Variant
    medians_ms: Mapping[str, float]
    """By variant, the median of its calls with a flushed L2."""
    failures: Mapping[str, str] = field(default_factory=dict)
    """By variant that cannot run this case, why."""
    counted_ms: float = 0.0
    """The median in the thread that will call it, of a variant that searches; 0 of others."""

    def facts(self) -> dict[str, str]:
        """For the record: "variant", "variant_ms.<name>" and "variant_error.<name>"; "variant_ms.charged" of some."""
        medians = {**self.medians_ms, **({COUNTED: self.counted_ms} if self.counted_ms else {})}
        measured = {MEASURED + name: f"{median:.5f}" for name, median in medians.items()}
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


class VariantThread(AbstractContextManager["VariantThread"]):
    """One variant in a thread of its own: one call at a time, under the variant's flags; the caller waits.

    Libraries keep by thread what they have found, under keys that need not distinguish variants. PyTorch looks for its
    plan of a cuDNN convolution whether or not `cudnn.benchmark` is on: in one thread, the variant that searches would
    be given the plan of the one that came before it, and never search.
    """

    def __init__(self, variant: Variant, flags: Mapping[str, Any], trial: TrialTensors) -> None:
        self._variant, self._flags, self._trial = variant, flags, trial
        self._like_here = like_this_thread(trial.device)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="klineage-variant")
        # A new thread begins without context variables. Triton keeps there what fla has set when it was imported.
        self._context = copy_context()
        self._inputs: Tensors = {}

    def __exit__(self, *_raised: object) -> None:
        self._thread.shutdown()

    def warm_up(self) -> None:
        """Convert the inputs and call, untimed. Raises what the variant raises."""
        self._inputs = self._in_thread(partial(warmed_up, self._variant, self._trial))

    def time_ms(self, timer: Timer) -> float:
        """What the timer says about one call."""
        return self._in_thread(partial(timer, partial(self._variant.call, self._inputs, self._trial.outputs)))

    def search_again(self, timer: Timer, reps: int) -> float:
        """The median of what another search finds. Only of a variant that can forget."""
        return self._in_thread(partial(searched_again, self._variant, self._trial, self._inputs, timer, reps))

    def _in_thread(self, work: Callable[[], Result]) -> Result:
        return self._thread.submit(self._context.run, self._under_flags, work).result()

    def _under_flags(self, work: Callable[[], Result]) -> Result:
        with self._like_here():
            write_flags(self._flags)
            return work()


def like_this_thread(device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """What puts another thread on this thread's GPU and current stream, and into its modes of autograd, for a while."""
    import torch

    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    stream = torch.cuda.current_stream() if device.type == "cuda" else None

    @contextmanager
    def like_here() -> Iterator[None]:
        if stream is not None:
            torch.cuda.set_device(stream.device)
        # Inference mode decides about gradients too, so they come after it. A stream of None changes nothing.
        with torch.cuda.stream(stream), torch.inference_mode(inference), torch.set_grad_enabled(grad):
            yield

    return like_here


def choose(
    variants: Mapping[str, Variant],
    trial: TrialTensors,
    *,
    countable: Collection[str] | None = None,
    timer: Timer | None = None,
    reps: int = REPS,
) -> Choice:
    """The fastest variant that may count (default: any); the process is left with that variant's flags.

    Variants run in threads of their own, which are gone when this returns; the chosen one is warm in this thread too. A
    variant that raises one of REFUSALS while it is warmed up is left out and recorded. When none is left that may
    count, raises UnsupportedCase where the library refused the case, HarnessError where something failed. Where the
    trial names one that was chosen before, that one is warmed up and taken.
    """
    if trial.only:
        return chosen_before(variants, trial, timer, reps)
    defaults = read_flags({name for variant in variants.values() for name in variant.flags})
    flags = {name: {**defaults, **variant.flags} for name, variant in variants.items()}
    with ExitStack() as stack:
        threads = {name: stack.enter_context(VariantThread(variants[name], flags[name], trial)) for name in variants}
        failures = warm_up_all(threads)
        ready = {name: thread for name, thread in threads.items() if name not in failures}
        eligible = [name for name in ready if countable is None or name in countable]
        if not eligible:
            write_flags(defaults)
            raise no_variant_runs(failures, countable)
        timer = timer or DeviceTimer()
        medians = medians_in_turns(ready, timer, reps)
        for name in [name for name in eligible if variants[name].forget]:
            found = [ready[name].search_again(timer, reps) for _ in range(DRAWS - 1)]
            medians[name] = min(medians[name], *found)
    best = min(eligible, key=medians.__getitem__)
    write_flags(flags[best])
    counted_ms = warm_up(variants[best], trial, medians[best], timer, reps)
    return Choice(best, variants[best], medians, failures, counted_ms)


def no_variant_runs(failures: Mapping[str, str], countable: Collection[str] | None) -> UnsupportedCase | HarnessError:
    """The error for no variant that may count: a refusal only where all of those have refused."""
    decisive = [why for name, why in failures.items() if countable is None or name in countable]
    causes = "; ".join(f"{name}: {why}" for name, why in failures.items()) or "there is none"
    kind = UnsupportedCase if decisive and all(map(refuses, decisive)) else HarnessError
    return kind(f"no variant of the reference runs: {causes}")


def warm_up_all(threads: Mapping[str, VariantThread]) -> dict[str, str]:
    """Why some cannot run, by name."""
    failures: dict[str, str] = {}
    for name, thread in threads.items():
        try:
            thread.warm_up()
        except REFUSALS as error:
            failures[name] = f"{type(error).__name__}: {error}"[:CAUSE_LENGTH]
    return failures


def medians_in_turns(threads: Mapping[str, VariantThread], timer: Timer, reps: int) -> dict[str, float]:
    """Median milliseconds of so many calls each, by name; every thread has called once before any calls again."""
    times: dict[str, list[float]] = {name: [] for name in threads}
    for _ in range(reps):
        for name, thread in threads.items():
            times[name].append(thread.time_ms(timer))
    return {name: statistics.median(taken) for name, taken in times.items()}


def chosen_before(variants: Mapping[str, Variant], trial: TrialTensors, timer: Timer | None, reps: int) -> Choice:
    """The variant that the trial names, warmed up under its flags. Raises HarnessError without one."""
    if trial.only not in variants:
        raise HarnessError(f"the reference has no variant {trial.only!r} any more; it has {', '.join(variants)}")
    variant = variants[trial.only]
    write_flags({**read_flags(set(variant.flags)), **variant.flags})
    return Choice(trial.only, variant, {}, counted_ms=warm_up(variant, trial, trial.only_ms, timer, reps))


def warm_up(variant: Variant, trial: TrialTensors, target_ms: float, timer: Timer | None, reps: int) -> float:
    """Warm a variant up in this thread. One that searches does so until it finds what is as fast as `target_ms`.

    Returns its median in milliseconds, of one that searches; else 0. What the last search found stays.
    """
    inputs = warmed_up(variant, trial)
    if variant.forget is None:
        return 0.0
    timer = timer or DeviceTimer()
    found_ms = median_ms(variant, trial, inputs, timer, reps)
    for _ in range(MOST_DRAWS - 1):
        if not target_ms or found_ms <= AS_FAST * target_ms:
            break
        found_ms = searched_again(variant, trial, inputs, timer, reps)
    return found_ms


def searched_again(variant: Variant, trial: TrialTensors, inputs: Tensors, timer: Timer, reps: int) -> float:
    """The median, in milliseconds, of what another search in this thread finds."""
    if variant.forget is not None:
        variant.forget(inputs)
    return median_ms(variant, trial, warmed_up(variant, trial), timer, reps)


def median_ms(variant: Variant, trial: TrialTensors, inputs: Tensors, timer: Timer, reps: int) -> float:
    """The median of so many calls one after the other, in milliseconds."""
    return statistics.median(timer(partial(variant.call, inputs, trial.outputs)) for _ in range(reps))


def warmed_up(variant: Variant, trial: TrialTensors) -> Tensors:
    """The trial's inputs in the variant's convention, after some calls with them have come to their end."""
    import torch

    inputs = trial.inputs if variant.convert is None else variant.convert(trial.inputs)
    for _ in range(WARMUP_CALLS):
        variant.call(inputs, trial.outputs)
    if trial.device.type == "cuda":
        torch.cuda.synchronize(trial.device)
    return inputs
