"""The flaggems reference: FlagGems' Triton functions, for operators of a user's that bear FlagGems' names.

Arguments are taken in the order of the case's inputs. The fastest of FlagGems' own entries counts; what PyTorch and
FlashInfer take for the same stands beside it in the record.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_klineage.errors import MissingDependency, UsageError
from pytest_klineage.records import KernelCase
from pytest_klineage.records.facts import VERSION_NOTE
from pytest_klineage.references.base import TrialTensors, Variant
from pytest_klineage.references.cudnn import ONLY_CUDNN_SDP
from pytest_klineage.references.device import DeviceReference, imported, torch_versions
from pytest_klineage.references.functions import package_version
from pytest_klineage.references.torch import ANY_SDP

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_klineage.references.base import Call, Tensors

REMEDY = "pip install --no-deps 'flag-gems>=5.0.2,<5.1' && pip install sqlalchemy PyYAML packaging"
"""Its metadata pin a NumPy that PyTorch for newer Python does not take."""
CHECKED = re.compile(r"5\.0\.\d+")
TRITON = (3, 6)
"""With 3.7 FlagGems' launcher misplaces arguments and aborts at the second launch."""
CACHE = "FLAGGEMS_CACHE_DIR"
MATRIX, ATTENTION, ROWS = ("mm", "addmm", "bmm", "grouped_mm"), ("attention", "causal_attention"), (
    "rms_norm", "layer_norm", "softmax", "fused_add_rms_norm",
)  # fmt: skip
OWN = "flaggems."
"""How the names of its variants begin; others are only measured."""


class FlagGemsReference(DeviceReference):
    """FlagGems 5.0 without `flag_gems.enable()`.

    Its tuner's keys leave out batch, heads, mask and groups. So every case has a folder of its own for what was tuned,
    and the process in which this runs serves one case.
    """

    name: ClassVar[str] = "flaggems"
    remedy: ClassVar[str] = REMEDY

    def operators(self) -> tuple[str, ...]:
        return MATRIX + ATTENTION + ROWS

    def limits(self, case: KernelCase, platform: str) -> str:
        takes = case.dtype in ("bf16", "fp16") or case.operator in ROWS
        return "" if takes else f"its {case.operator} is compared in bf16 and fp16, not in {case.dtype}"

    def ahead(self, case: KernelCase) -> tuple[str, ...]:
        return ("triton.language", "sqlalchemy")

    def variants(self, case: KernelCase, trial: TrialTensors) -> dict[str, Variant]:
        tuned_in(case)
        check_triton()
        gems = imported("flag_gems", "ops", REMEDY)
        names = [name for name in trial.outputs if name not in trial.inputs]
        found = own_variants(case, gems, trial, names)
        return {f"{OWN}{name}": variant for name, variant in found.items()} | beside(case, trial, names)

    def countable(self, case: KernelCase) -> Collection[str]:
        return [OWN + name for name in ("generic", "hopper", "sdpa", "flash")]

    def label(self, case: KernelCase) -> str:
        choice = self._choices.get(case.id)
        return choice.name if choice else self.name

    def versions(self) -> dict[str, str]:
        found = package_version("flag_gems")
        version = next(iter(found.values()), "unknown")
        note = {} if CHECKED.fullmatch(version) else {VERSION_NOTE: f"flag-gems {version} runs; 5.0.2 was checked"}
        return torch_versions() | package_version("triton") | found | note

    def describe(self, case: KernelCase) -> dict[str, str]:
        """Also what its tuner has chosen, by kernel."""
        return super().describe(case) | configurations(Path(os.environ.get(CACHE, "")))


def tuned_in(case: KernelCase) -> None:
    """Have FlagGems and Triton keep what they tune for a case in a folder of the case's own.

    Raises UsageError in a process that has imported FlagGems for another case: it would find that one's choices.
    """
    base = Path(os.environ.get(CACHE) or Path.home() / "flaggems")
    folder = base if base.name == case.id else base / case.id
    if "flag_gems" in sys.modules and folder != base:
        raise UsageError("FlagGems is imported here for another case; each case needs a process of its own")
    # Triton's own autotuner keeps nothing between processes unless it is asked to. Without a name FlagGems imports what
    # it has for every vendor, and asks each one's tool for a device.
    triton = {"TRITON_CACHE_DIR": str(folder / "triton"), "TRITON_CACHE_AUTOTUNING": "1"}
    os.environ.update({CACHE: str(folder), "GEMS_VENDOR": "nvidia", **triton})


def check_triton() -> None:
    """Raise MissingDependency unless Triton is of the version that FlagGems 5.0 runs with."""
    found = imported("triton", "__version__", "pip install 'triton>=3.6,<3.7'")
    if tuple(int(part) for part in found.split(".")[:2]) != TRITON:
        raise MissingDependency("triton 3.6", "pip install 'triton>=3.6,<3.7'")


def own_variants(case: KernelCase, gems: Any, trial: TrialTensors, names: list[str]) -> dict[str, Variant]:
    """FlagGems' entries for a case."""
    if case.operator in ATTENTION:
        return attention(gems, "causal" in case.operator)
    eps = trial.named.get("eps", 1e-5)
    calls: dict[str, Callable[..., Any]] = {
        "mm": gems.mm, "addmm": gems.addmm, "bmm": gems.bmm,
        "grouped_mm": lambda a, b, ends: grouped()(a, b, ends),
        "rms_norm": lambda x, w: gems.rms_norm_forward(x, (x.shape[-1],), w, eps)[0],
        "layer_norm": lambda x, w, b: gems.layer_norm(x, (x.shape[-1],), w, b, eps)[0],
        "softmax": lambda x: gems.softmax(x, -1),
        "fused_add_rms_norm": lambda x, residual, w: fused_add()(x, residual, (x.shape[-1],), w, eps),
    }  # fmt: skip
    found = {"generic": Variant(returning(calls[case.operator], names))}
    if case.operator == "mm" and trial.platform == "sm90":
        # The package's own name is the override for the architecture, flag_gems.ops has the generic function.
        found["hopper"] = Variant(returning(imported("flag_gems", "mm", REMEDY), names))
    return found


def grouped() -> Any:
    """FlagGems' grouped product."""
    return imported("flag_gems.ops.group_gemm", "group_mm", REMEDY)


def fused_add() -> Any:
    """FlagGems' fused_add_rms_norm, which overwrites its first two arguments."""
    return imported("flag_gems.fused", "fused_add_rms_norm", REMEDY)


def attention(gems: Any, causal: bool) -> dict[str, Variant]:
    """Both entries: [B,H,S,D] as it is, and [B,S,H,D], which its users keep."""

    def sdpa(inputs: Tensors, outputs: Tensors) -> Tensors:
        o, _sums = forward(*inputs.values(), is_causal=causal, enable_gqa=True)
        return {"o": o}

    def flash(inputs: Tensors, outputs: Tensors) -> Tensors:
        tokens = inputs["q"].shape[1]
        o = gems.flash_attention_forward(*inputs.values(), None, None, tokens, tokens, 0.0, causal, False)[0]
        return {"o": o.transpose(1, 2)}

    forward = imported("flag_gems.ops.attention", "scaled_dot_product_attention_forward", REMEDY)
    return {"sdpa": Variant(sdpa), "flash": Variant(flash, tokens_first)}


def tokens_first(inputs: Tensors) -> Tensors:
    """[B,H,S,D] as contiguous [B,S,H,D]."""
    return {name: tensor.transpose(1, 2).contiguous() for name, tensor in inputs.items()}


def beside(case: KernelCase, trial: TrialTensors, names: list[str]) -> dict[str, Variant]:
    """PyTorch's own functions, with cuBLAS and cuDNN below, and FlashInfer's where it is installed."""
    import torch

    functional, eps = torch.nn.functional, trial.named.get("eps", 1e-5)
    if case.operator in ATTENTION:
        attend = partial(functional.scaled_dot_product_attention, is_causal="causal" in case.operator, enable_gqa=True)
        call = returning(attend, names)
        return {"torch": Variant(call, flags=ANY_SDP), "cudnn": Variant(call, flags=ONLY_CUDNN_SDP)}

    def add_norm(x: Any, residual: Any, w: Any) -> None:
        residual.add_(x)
        x.copy_(functional.rms_norm(residual, (x.shape[-1],), w, eps))

    calls: dict[str, Callable[..., Any]] = {
        "mm": torch.mm, "addmm": torch.addmm, "bmm": torch.bmm,
        "grouped_mm": lambda a, b, ends: torch._grouped_mm(a, b, offs=ends),
        "rms_norm": lambda x, w: functional.rms_norm(x, (x.shape[-1],), w, eps),
        "layer_norm": lambda x, w, b: functional.layer_norm(x, (x.shape[-1],), w, b, eps),
        "softmax": lambda x: functional.softmax(x, -1), "fused_add_rms_norm": add_norm,
    }  # fmt: skip
    return {"torch": Variant(returning(calls[case.operator], names))} | flashinfer(case, eps, names)


def flashinfer(case: KernelCase, eps: float, names: list[str]) -> dict[str, Variant]:
    """FlashInfer's norms; none where it is not installed."""
    function = {"rms_norm": "rmsnorm", "fused_add_rms_norm": "fused_add_rmsnorm"}.get(case.operator)
    if function is None:
        return {}
    try:
        norm = imported("flashinfer.norm", function, REMEDY)
    except MissingDependency:
        return {}
    return {"flashinfer": Variant(returning(lambda *given: norm(*given, eps), names))}


def returning(function: Callable[..., Any], names: list[str]) -> Call:
    """A call of a function of the inputs in order, with its result by name; none of one that works in place."""

    def call(inputs: Tensors, outputs: Tensors) -> Tensors | None:
        result = function(*inputs.values())
        return {names[0]: result} if names else None

    return call


def configurations(folder: Path) -> dict[str, str]:
    """By kernel, the configuration that FlagGems' tuner has chosen: "tuned.<kernel>", from its database."""
    # Not above: a kernel's worker imports this file, and must not have a database engine at hand.
    import sqlite3

    found: dict[str, str] = {}
    for path in sorted(folder.glob("config_cache/*.db")):
        with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as database:
            database.row_factory = sqlite3.Row
            tables = [row[0] for row in database.execute("select name from sqlite_master where type = 'table'")]
            for table in (name for name in tables if "_benchmark" not in name):
                rows = [dict(row) for row in database.execute(f'select * from "{table}"')]
                kernel = re.sub(r"_[0-9a-f]{32}(-[0-9a-f]{32})?$", "", table)
                found[f"tuned.{kernel}"] = "; ".join(map(configuration, rows))
    return found


def configuration(row: dict[str, Any]) -> str:
    """A row of the database without its keys: "BLOCK_M 128, num_warps 8"."""
    return ", ".join(f"{name} {value}" for name, value in row.items() if not name.startswith("key_"))
