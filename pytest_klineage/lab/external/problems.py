"""A case written down as others expect a problem: a KernelBench file for AdaExplore, a trace set for AccelOpt.

Each is the case's definition in PyTorch, with inputs of the case's shapes. Verdicts come from the gate in any event.
"""

from __future__ import annotations

import csv
import io
import json
import textwrap
from pathlib import Path
from typing import Any

from pytest_klineage.errors import UnknownName, UsageError
from pytest_klineage.lab.external.evaluating import EvaluationTarget
from pytest_klineage.operators import OPERATORS, Operator, operator_of
from pytest_klineage.operators.distributions import TORCH_DTYPES
from pytest_klineage.records import KernelCase, Surface, TensorSpec, Verdict
from pytest_klineage.records.signature import contiguous_strides

KERNELBENCH = """\
import torch


class Model(torch.nn.Module):
    # {title}
    # {note}

    def forward(self, {arguments}):
{body}


def get_inputs():
    return [
{inputs}
    ]


def get_init_inputs():
    return []
"""
NOTE = "Tensors have the strides of get_inputs; results are returned in the order of this forward."


def body_of(case: KernelCase) -> str:
    """The case's definition as lines of PyTorch. Raises UnknownName for an operator that has none here."""
    if found := operator_of(case).in_torch(case):
        return found
    known = [name for name, chosen in OPERATORS.items() if type(chosen).in_torch is not Operator.in_torch]
    raise UnknownName("operator with a definition in PyTorch", case.operator, known)


def kernelbench_file(case: KernelCase) -> str:
    """A KernelBench problem: class Model, get_inputs, get_init_inputs."""
    signature = operator_of(case).signature(case)
    return KERNELBENCH.format(
        title=case.id, note=NOTE, arguments=", ".join(spec.name for spec in signature.inputs),
        body=textwrap.indent(body_of(case), " " * 8),
        inputs="\n".join(f"        {_made(case, spec)}," for spec in signature.inputs),
    )  # fmt: skip


def write_kernelbench(target: EvaluationTarget, checkout: Path, suffix: str) -> Path:
    """Put the problem where AdaExplore looks for it: datasets/KernelBench_SUFFIX/level1/1_CASE.py. Returns the file."""
    datasets = checkout / "datasets"
    if not (checkout / "agent" / "agent_entry.py").is_file():
        raise UsageError(f"{checkout} is not a checkout of AdaExplore: it has no agent/agent_entry.py")
    for level in ("level1", "level2", "level3"):  # read when it is imported
        (datasets / "KernelBench" / level).mkdir(parents=True, exist_ok=True)
    path = datasets / f"KernelBench_{suffix}" / "level1" / f"1_{target.case.id}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(kernelbench_file(target.case), encoding="utf-8")
    return path


def definition(case: KernelCase) -> dict[str, Any]:
    """The case as a FlashInfer-Trace definition; every axis is a constant."""
    signature = operator_of(case).signature(case)
    sizes = sorted({size for spec in (*signature.inputs, *signature.outputs) for size in spec.shape})
    names = {size: f"n{size}" for size in sizes}
    tensors = {
        side: {
            spec.name: {
                "shape": [names[size] for size in spec.shape], "dtype": TORCH_DTYPES[spec.dtype],
                "description": f"strides {list(spec.strides)}",
            }
            for spec in specs
        }
        for side, specs in (("inputs", signature.inputs), ("outputs", signature.outputs))
    }  # fmt: skip
    arguments = ", ".join(spec.name for spec in signature.inputs)
    reference = f"import torch\n\n\ndef run({arguments}):\n{textwrap.indent(body_of(case), '    ')}\n"
    return {
        "name": _plain_name(case), "op_type": case.operator, "description": case.id, "tags": [], "constraints": [],
        "axes": {names[size]: {"type": "const", "value": size} for size in sizes}, **tensors, "reference": reference,
    }  # fmt: skip


def write_trace_set(target: EvaluationTarget, root_verdict: Verdict, folder: Path) -> Path:
    """Definition, workload, root solution and its trace below `folder`, with AccelOpt's start file. Returns that.

    Raises UsageError when the root is not a Python kernel that was right and timed: AccelOpt begins with its time.
    """
    timing, root, case = root_verdict.timing, target.root, target.case
    if root is None or root.main is None or target.surface in (Surface.CPP, Surface.CUDA):
        raise UsageError("AccelOpt begins with a Python kernel that defines run: name one with --root")
    if not root_verdict.scored or timing is None:
        raise UsageError(f"AccelOpt begins with a kernel that is right; the root is {root_verdict.code.value}")
    name, op = _plain_name(case), case.operator
    inputs = {spec.name: {"type": "random"} for spec in operator_of(case).signature(case).inputs}
    workload = {"axes": {}, "inputs": inputs, "uuid": name}
    solution = {
        "name": "root", "definition": name, "author": "root", "description": "the root", "spec": {
            "language": "triton", "target_hardware": [target.platform], "entry_point": f"main.py::{root.entry}",
            "dependencies": []},
        "sources": [{"path": "main.py", "content": root.main.text}],
    }  # fmt: skip
    evaluation = {
        "status": "PASSED", "environment": {"hardware": target.platform, "libs": {}}, "log": "",
        "timestamp": root_verdict.judged_at, "correctness": None, "performance": {
            "latency_ms": timing.candidate_ms, "reference_latency_ms": timing.reference_ms,
            "speedup_factor": timing.speedup.estimate},
    }  # fmt: skip
    files = {
        "definition_path": (f"definitions/{op}/{name}.json", definition(case)),
        "solution_path": (f"solutions/{op}/{name}/root.json", solution),
        "workload_path": (f"workloads/{op}/{name}.json", {"definition": name, "workload": workload}),
        "trace_path": (f"traces/{op}/{name}_root.json", {
            "definition": name, "workload": workload, "solution": "root", "evaluation": evaluation}),
    }  # fmt: skip
    for relative, content in files.values():
        path = folder / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=2), encoding="utf-8")
    return _start_file(folder, {column: folder.resolve() / relative for column, (relative, _) in files.items()})


def _start_file(folder: Path, paths: dict[str, Path]) -> Path:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(paths)
    writer.writerow(map(str, paths.values()))
    start = folder / "profile_results.csv"
    start.write_text(text.getvalue(), encoding="utf-8")
    return start


def _made(case: KernelCase, spec: TensorSpec) -> str:
    """An expression for one random input."""
    shape = ", ".join(map(str, spec.shape))
    made = operator_of(case).drawn_in_torch.get(spec.name, "{}").format(f"torch.randn({shape})")
    typed = f"{made}.to(torch.{TORCH_DTYPES[spec.dtype]})"
    if spec.strides == contiguous_strides(spec.shape):
        return typed
    size = 1 + sum((length - 1) * stride for length, stride in zip(spec.shape, spec.strides, strict=True))
    storage = f"torch.randn({size}).to(torch.{TORCH_DTYPES[spec.dtype]})"
    return f"{storage}.as_strided({spec.shape}, {spec.strides})"


def _plain_name(case: KernelCase) -> str:
    return case.id.replace("-", "_").replace("=", "_")
