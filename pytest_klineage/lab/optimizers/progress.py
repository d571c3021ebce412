"""How far an optimization is, as a record and as one line. Who draws it is the caller's business."""

from __future__ import annotations

import msgspec

from pytest_klineage.lab.optimizers.task import Observation


class StepProgress(msgspec.Struct, frozen=True, kw_only=True):
    """The state of an optimization after one step."""

    observation: Observation
    max_steps: int
    spent_usd: float
    limit_usd: float

    @property
    def line(self) -> str:
        """One line, such as "step 3/10, $0.42 of $10.00, best 0.87x; this one 0.61x (slower.than_required)"."""
        seen = self.observation
        best = "none yet" if seen.best_speedup is None else f"{seen.best_speedup:.2f}x"
        return (
            f"step {seen.step}/{self.max_steps}, ${self.spent_usd:.2f} of ${self.limit_usd:.2f}, best {best}; "
            f"{_this(seen)}"
        )


def _this(seen: Observation) -> str:
    if seen.verdict is None:
        return "no kernel in the reply"
    speed = "" if seen.speedup is None else f"{seen.speedup:.2f}x "
    again = "" if seen.repeats is None else f", the same as step {seen.repeats}"
    return f"this one {speed}({seen.verdict.code.value}{again})"
