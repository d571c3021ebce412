"""With the framework's computing operations refused, what computes raises and what moves bytes works."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SCRIPT = """
import json, threading, warnings
warnings.simplefilter("ignore")
import torch
from pytest_klineage.worker.sandbox.refusal import refuse_compute
a, b = torch.arange(12.0).view(3, 4), torch.ones(4, 3)
expected = (a @ b).tolist()
refuse_compute()
import gc
for found in gc.get_objects():
    if isinstance(found, torch.library.Library):
        found._destroy()
gc.collect()
answers = {}
def attempt(name, function):
    try:
        function()
        answers[name] = "done"
    except BaseException as error:
        answers[name] = f"{type(error).__name__}: {error}"
computing = {
    "matmul": lambda: a @ b, "mm": lambda: torch.mm(a, b), "out": lambda: torch.mm(a, b, out=torch.empty(3, 3)),
    "add": lambda: a + 1, "in place": lambda: a.add_(1), "sum": lambda: a.sum(), "softmax": lambda: a.softmax(0),
    "topk": lambda: a.topk(2), "sort": lambda: a.sort(), "einsum": lambda: torch.einsum("ij,jk->ik", a, b),
    "linear": lambda: torch.nn.functional.linear(a, b.t()), "exp": lambda: a.exp(),
    "where": lambda: torch.where(a > 1, a, a),
    "conv2d": lambda: torch.nn.functional.conv2d(a.view(1, 1, 3, 4), b.view(1, 1, 4, 3)[:, :, :2, :2]),
    "attention": lambda: torch.nn.functional.scaled_dot_product_attention(a[None], a[None], a[None]),
    "low level": lambda: torch.ops.aten.mm.default(a, b), "cumsum": lambda: a.cumsum(0), "max": lambda: a.max(),
    "arange": lambda: torch.arange(0.0, 1.0, 0.1),
    "xor": lambda: torch.bitwise_xor(a.int(), a.int()), "xor in place": lambda: a.int().bitwise_xor_(a.int()),
}
moving = {
    "empty": lambda: torch.empty(3), "zeros": lambda: torch.zeros(3), "zeros_like": lambda: torch.zeros_like(a),
    "full": lambda: torch.full((2,), 3.0), "view": lambda: a.view(4, 3), "reshape": lambda: a.t().reshape(12),
    "transpose": lambda: a.t().contiguous(), "permute": lambda: a[None].permute(2, 0, 1), "slice": lambda: a[1:, ::2],
    "copy": lambda: torch.empty(3, 4).copy_(a), "cast": lambda: a.to(torch.float64), "clone": lambda: a.clone(),
    "half": lambda: a.half(), "item": lambda: a[1, 2].item(), "pointer": lambda: a.data_ptr(),
    "list": lambda: a.tolist(),
    "indices": lambda: torch.arange(5), "indices of a type": lambda: torch.arange(2, 20, 3, dtype=torch.float32),
    "indices in place": lambda: torch.arange(3, out=torch.empty(3, dtype=torch.int64)),
    "expand": lambda: torch.ones(1).expand(4), "split": lambda: a.split(2), "fill": lambda: torch.empty(3).fill_(2.0),
    "squeeze": lambda: a[None].squeeze(0), "frombuffer": lambda: torch.frombuffer(bytearray(8), dtype=torch.float32),
}
for name, function in {**computing, **moving}.items():
    attempt(name, function)
thread = threading.Thread(target=attempt, args=("in a thread", computing["matmul"]))
thread.start()
thread.join()
print(json.dumps({"computing": [*computing, "in a thread"], "moving": list(moving), "answers": answers}))
"""


@pytest.fixture(scope="module")
def outcome() -> dict[str, list[str] | dict[str, str]]:
    out = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=False)
    assert out.returncode == 0, out.stderr
    result: dict[str, list[str] | dict[str, str]] = json.loads(out.stdout.splitlines()[-1])
    return result


def test_everything_that_computes_is_refused(outcome: dict[str, dict[str, str]]) -> None:
    wrong = {
        name: outcome["answers"][name]
        for name in outcome["computing"]
        if not outcome["answers"][name].startswith("FrameworkRefused: aten::")
    }
    assert wrong == {}


def test_everything_that_only_moves_bytes_works(outcome: dict[str, dict[str, str]]) -> None:
    wrong = {name: outcome["answers"][name] for name in outcome["moving"] if outcome["answers"][name] != "done"}
    assert wrong == {}


def test_the_refusal_says_what_was_called_and_why(outcome: dict[str, dict[str, str]]) -> None:
    assert "aten::mm" in outcome["answers"]["mm"]
    assert 'library="forbid"' in outcome["answers"]["mm"]
