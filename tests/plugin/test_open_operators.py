"""Operators of a user's own test file, with the real gate on a CPU: judged, recorded, or refused with one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_klineage.records import Status
from pytest_klineage.results.runs import read_run

RATE = '#include "klineage.h"\n#include <cmath>\nextern "C" int run(const klineage_call *call) {'
SOFTMAX_CPP = (
    RATE
    + """
    const klineage_tensor &x = call->inputs[0], &y = call->outputs[0];
    const bool log = klineage_scalar_value(call, "log", 0) != 0;
    for (int64_t i = 0; i < x.shape[0]; ++i) {
        const float *a = (const float *)x.data + i * x.shape[1];
        float *b = (float *)y.data + i * x.shape[1];
        float top = a[0];
        double sum = 0;
        for (int64_t j = 0; j < x.shape[1]; ++j) top = a[j] > top ? a[j] : top;
        for (int64_t j = 0; j < x.shape[1]; ++j) sum += std::exp(a[j] - top);
        for (int64_t j = 0; j < x.shape[1]; ++j)
            b[j] = log ? a[j] - top - std::log(sum) : std::exp(a[j] - top) / sum;
    }
    return 0;
}
"""
)
ADD_NORM_CPP = (
    RATE
    + """
    const klineage_tensor &x = call->inputs[0], &r = call->inputs[1], &w = call->inputs[2];
    if (call->num_outputs != 0) return 1;
    const double eps = klineage_scalar_value(call, "eps", 0);
    for (int64_t i = 0; i < x.shape[0]; ++i) {
        float *a = (float *)x.data + i * x.shape[1], *b = (float *)r.data + i * x.shape[1];
        double sum = 0;
        for (int64_t j = 0; j < x.shape[1]; ++j) { b[j] += a[j]; sum += (double)b[j] * b[j]; }
        const float scale = 1 / std::sqrt(sum / x.shape[1] + eps);
        for (int64_t j = 0; j < x.shape[1]; ++j) a[j] = b[j] * scale * ((float *)w.data)[j];
    }
    return 0;
}
"""
)
ADD_PY = """
import ctypes

def floats(tensor):
    return (ctypes.c_float * tensor.numel()).from_address(tensor.data_ptr())

def right(x, y):
    values, more = floats(x), floats(y)
    for place in range(len(values)):
        values[place] += more[place]

def returned(x, y):
    right(x, y)
    return x

def elsewhere(x, y):
    import torch
    fresh = torch.empty_like(x)
    ctypes.memmove(fresh.data_ptr(), x.data_ptr(), 4 * x.numel())
    right(fresh, y)
    return fresh
"""
QUANTISE_PY = """
import ctypes, math

def run(x, out):
    y, scale = out
    rows, columns = x.shape
    values = (ctypes.c_float * (rows * columns)).from_address(x.data_ptr())
    codes = (ctypes.c_uint8 * (rows * columns)).from_address(y.data_ptr())
    scales = (ctypes.c_float * rows).from_address(scale.data_ptr())
    for row in range(rows):
        line = values[row * columns:(row + 1) * columns]
        scales[row] = max(map(abs, line)) / 448
        for column, value in enumerate(line):
            codes[row * columns + column] = e4m3(value / scales[row])

def e4m3(value):
    sign, value = (0x80 if value < 0 else 0), abs(value)
    power = max(math.floor(math.log2(value)), -6) if value else -6
    steps = round(value / 2.0 ** (power - 3))
    if steps == 16:
        steps, power = 8, power + 1
    return sign | (((power + 7) << 3) + steps - 8 if steps >= 8 else steps)
"""
DEQUANTISE_CPP = (
    RATE
    + """
    const klineage_tensor &x = call->inputs[0], &y = call->outputs[0];
    if (x.dtype != KLINEAGE_FLOAT8_E4M3) return 1;
    for (int64_t i = 0; i < x.shape[0] * x.shape[1]; ++i) {
        const int code = ((const uint8_t *)x.data)[i], power = code >> 3 & 15;
        const float size = power ? std::ldexp(8 + (code & 7), power - 10) : std::ldexp(code & 7, -9);
        ((float *)y.data)[i] = (code & 128 ? -size : size) * ((const float *)call->inputs[1].data)[i / x.shape[1]];
    }
    return 0;
}
"""
)
LOOKUP_PY = """
import ctypes

def run(x, table, idx, keep, out):
    y, best = out
    (rows, columns), entries = x.shape, table.shape[0]
    xs = (ctypes.c_float * (rows * columns)).from_address(x.data_ptr())
    ts = (ctypes.c_float * (entries * columns)).from_address(table.data_ptr())
    ys = (ctypes.c_float * (rows * columns)).from_address(y.data_ptr())
    places = (ctypes.c_int64 * rows).from_address(idx.data_ptr())
    kept = (ctypes.c_uint8 * rows).from_address(keep.data_ptr())
    found = (ctypes.c_int64 * rows).from_address(best.data_ptr())
    for row in range(rows):
        line = [xs[row * columns + j] + kept[row] * ts[places[row] * columns + j] for j in range(columns)]
        ys[row * columns:(row + 1) * columns] = line
        found[row] = max(range(columns), key=line.__getitem__)
"""
DEFINITIONS = '''
import torch
from pytest_klineage import allclose, kernel_case, make_case, operator

@operator("x[M,N] -> y[M,N]", dtypes=("fp32", "bf16"))
def softmax(x, *, log: bool = False):
    """Softmax of every row."""
    return torch.log_softmax(x, -1) if log else torch.softmax(x, -1)

@softmax.inputs("shifted")
def shifted(x):
    return x + 80

@operator("inout x[M,N], inout residual[M,N], w[N]")
def add_norm(x, residual, w, *, eps: float = 1e-6):
    total = x + residual
    return total * torch.rsqrt(total.float().square().mean(-1, keepdim=True) + eps).to(total.dtype) * w, total

@operator("inout x[N], y[N]")
def add(x, y):
    return x + y

@operator("x[M,N] -> y[M,N]: fp8_e4m3, scale[M]: fp32", dtypes=("fp32", "bf16"))
def quantise(x):
    scale = x.float().abs().amax(-1) / 448
    return (x.float() / scale[:, None]).to(torch.float8_e4m3fn), scale

@operator("x[M,N]: fp8_e4m3, scale[M]: fp32 -> y[M,N]")
def dequantise(x, scale):
    return x.float() * scale[:, None]

@operator("x[T,D], table[V,D], idx[T]: int64 < V, keep[T]: bool -> y[T,D], best[T]: int64")
def lookup(x, table, idx, keep):
    y = x + keep[:, None] * table[idx]
    return y, y.argmax(-1)

@operator("x[N] -> y[N]", dtypes=("fp32",))
def running(x):
    return x.cumsum(0)

def before(x, log):
    return torch.log_softmax(x, -1) if log else torch.softmax(x, -1)

EASY = dict(at_least=0.0001)
'''
SUITE = (
    DEFINITIONS
    + """
@kernel_case((33, 40), "fp32", op=softmax, also=[(1, 7), (3, 91)], **EASY)
def test_native(kernel_gate):
    verdict = kernel_gate("softmax.cpp")
    checked = {check.input_distribution for check in verdict.checks}
    assert checked >= {"well_conditioned", "one_element_changed", "shifted"}
    assert {tuple(check.shape.values()) for check in verdict.checks} == {(), (1, 7), (3, 91)}
    assert verdict.reference["label"] == "the definition, eager"

@kernel_case(shapes=[(5, 12), (6, 13)], dtype="fp32", op="test_own.py:softmax", log=True, ref=before, **EASY)
def test_sweep(kernel_gate):
    verdict = kernel_gate("softmax.cpp")
    assert verdict.reference["label"] == "test_own.py:before"

@kernel_case((12, 20), "fp32", op=add_norm, **EASY)
def test_in_place(kernel_gate):
    assert {check.output for check in kernel_gate("add_norm.cpp").checks} == {"x", "residual"}

import pytest

@kernel_case((50,), "fp32", op=add, **EASY)
@pytest.mark.parametrize("entry", ["right", "returned", "elsewhere"])
def test_in_place_python(kernel_gate, entry):
    kernel_gate("add.py", entry=entry)

@kernel_case((12, 20), "fp32", op=quantise, **EASY)
def test_eight_bits(kernel_gate):
    kernel_gate("quantise.py")

@kernel_case((12, 20), "fp32", op=dequantise, **EASY)
def test_from_eight_bits(kernel_gate):
    kernel_gate("dequantise.cpp")

@kernel_case((11, 16, 9), "fp32", op=lookup, **EASY)
def test_whole_numbers(kernel_gate):
    kernel_gate("lookup.py")

@kernel_case((70,), "fp32", op=running, **EASY)
def test_without_symmetry(kernel_gate):
    verdict = kernel_gate("running.cpp")
    assert "every timed input is a new problem" in verdict.notes[-1]
"""
)
RUNNING_CPP = (
    RATE
    + """
    double sum = 0;
    for (int64_t i = 0; i < call->inputs[0].shape[0]; ++i)
        ((float *)call->outputs[0].data)[i] = (float)(sum += ((const float *)call->inputs[0].data)[i]);
    return 0;
}
"""
)


@pytest.fixture
def own(pytester: pytest.Pytester) -> Path:
    for name, text in {
        "softmax.cpp": SOFTMAX_CPP, "add_norm.cpp": ADD_NORM_CPP, "add.py": ADD_PY, "quantise.py": QUANTISE_PY,
        "lookup.py": LOOKUP_PY, "running.cpp": RUNNING_CPP,
        "dequantise.cpp": DEQUANTISE_CPP, "pytest.ini": "[pytest]\n",
    }.items():  # fmt: skip
        (pytester.path / name).write_text(text)
    return pytester.path


def test_operators_of_a_test_file_are_judged(
    own: Path, pytester: pytest.Pytester, processes: tuple[str, ...], quick: tuple[str, ...]
) -> None:
    pytester.makepyfile(test_own=SUITE)
    result = pytester.runpytest_subprocess(*processes, *quick, "--klineage-platform=cpu")
    result.assert_outcomes(passed=10, failed=1)
    result.stdout.fnmatch_lines(["*wrong_shape.count: the kernel returned a new tensor for x*in place*"])

    (path,) = own.glob("results/runs/*/records.jsonl")
    verdicts = {record.nodeid.partition("::")[2]: record.verdict for record in read_run(path).records}
    assert len(verdicts) == 11
    assert verdicts["test_in_place_python[elsewhere]"].status is Status.WRONG_SHAPE
    definition = verdicts["test_native"].case.definition
    assert definition is not None
    floor = verdicts["test_native"].floor
    assert floor is not None
    assert (floor.limit, floor.product, floor.ms > 0) == ("bytes", "", True)
    assert verdicts["test_in_place_python[elsewhere]"].floor is None
    assert definition.source == "test_own.py:softmax"
    assert definition == verdicts["test_sweep[5x12]"].case.definition


BAD = """
import torch
from pytest_klineage import allclose, kernel_case, operator

def judged(definition, **given):
    found = operator("x[M,N] -> y[M,N]", dtypes=("fp32",), **given)(definition)

    @kernel_case((8, 9), "fp32", op=found)
    def test(kernel_gate):
        kernel_gate("softmax.cpp")

    return test

def rolls_dice(x):
    return x + torch.rand(())

def cuts(x):
    return x[:, 1:]

def needs_a_gpu(x):
    return x.cuda()

def changes(x):
    return x.mul_(2)

def lacks(x):
    import no_such_package

def doubles(x):
    return 2 * x

test_dice, test_cuts, test_gpu = judged(rolls_dice), judged(cuts), judged(needs_a_gpu)
test_changes, test_lacks = judged(changes), judged(lacks)
test_loose = judged(doubles, tolerance=allclose(atol=100))

def ends(x):
    import os
    os._exit(3)

test_ends = judged(ends)
"""
BAD_LINES = {
    "test_dice": "test_bad.py:13: operator rolls_dice: the definition is not deterministic: two calls give different y",
    "test_cuts": "test_bad.py:16: operator cuts: the definition returns y with shape (8, 8), the signature says (8, 9)",
    "test_gpu": "test_bad.py:20: operator needs_a_gpu: the definition failed: *this is a CPU*",
    "test_changes": "test_bad.py:22: operator changes: the definition changes its input x; *",
    "test_lacks": "test_bad.py:26: operator lacks: the definition failed: ModuleNotFoundError: *no_such_package*",
    "test_ends": "test_bad.py:35: operator ends: the definition does not come back: the oracle process ended*",
    "test_loose": "test_bad.py:28: operator doubles: the tolerance accepts answers that compute nothing: zeros, *",
}


def test_a_bad_definition_is_one_line_and_nothing_is_built(
    own: Path, pytester: pytest.Pytester, quick: tuple[str, ...]
) -> None:
    pytester.makepyfile(test_bad=BAD)
    # A definition that asks for a GPU must fail on every machine.
    pytester.makeconftest('import os\nos.environ["CUDA_VISIBLE_DEVICES"] = ""\n')
    cache = own / "cache"
    result = pytester.runpytest_subprocess(*quick, "--klineage-platform=cpu", f"--klineage-cache-dir={cache}")
    result.assert_outcomes(failed=len(BAD_LINES))
    for line in BAD_LINES.values():
        result.stdout.fnmatch_lines([f"klineage: {line}"])
    result.stdout.no_fnmatch_line("*Traceback*")
    assert not list(cache.rglob("kernel.so"))


COLLECTED = {
    "a signature": ('@operator("x[M -> y[M]")\ndef f(x): ...', "*test_it.py:2: operator f: *'x[M' is no tensor*"),
    "parameters": ('@operator("x[M] -> y[M]")\ndef f(a): ...', "*test_it.py:2: operator f: *the parameters are (a)*"),
    "a type": ('@operator("x[M] -> y[M]", dtypes=("half",))\ndef f(x): ...', "*unknown dtype 'half'*fp16*"),
    "no signature": ("@operator\ndef f(x): ...", "test_it.py:2: @operator needs the signature first: *"),
    "a class": ('@operator("x[M] -> y[M]")\nclass f: ...', "test_it.py:2: @operator stands before a function, *"),
    "an option": (
        '@operator("x[M] -> y[M]")\ndef f(x, *, k=None): ...',
        "test_it.py:2: operator f: the option k has the default None; *",
    ),
    "no file": (
        '@kernel_case((4,), "fp32", op="none.py:f")\ndef test(kernel_gate): ...',
        "test_it.py:2: *no file *none.py",
    ),
    "a reference": (
        '@operator("x[M] -> y[M]")\ndef f(x): ...\n@kernel_case((4,), "fp32", op=f, ref="cublas")\n'
        "def test(kernel_gate): ...",
        "test_it.py:4: test: unknown reference for f 'cublas'*torch.compile*",
    ),
    "a file of a reference": (
        '@operator("x[M] -> y[M]")\ndef f(x): ...\n@kernel_case((4,), "fp32", op=f, ref="none.py:f")\n'
        "def test(kernel_gate): ...",
        "*there is no file none.py beside the test*",
    ),
    "variants of a name": (
        '@operator("x[M] -> y[M]")\ndef f(x): ...\n@kernel_case((4,), "fp32", op=f, variants=("a:b",))\n'
        "def test(kernel_gate): ...",
        "*variants= and prepare= belong to a ref that is a function*",
    ),
    "an axis of a case": (
        '@operator("x[M] -> y[M]")\ndef f(x): ...\n\n@kernel_case({"N": 4}, "fp32", op=f)\ndef test(kernel_gate): ...',
        "test_it.py:5: test: unknown axis of f 'N'. Valid: M.",
    ),
    "an axis of an output": (
        '@operator("x[M] -> y[N]")\ndef f(x): ...\n@kernel_case((4,), "fp32", op=f)\ndef test(kernel_gate): ...',
        "test_it.py:4: test: f has 2 axes (M, N (of y alone)), got 1 sizes: *",
    ),
    "no operator": (
        'def f(x): ...\n@kernel_case((4,), "fp32", op=f)\ndef test(kernel_gate): ...',
        "test_it.py:3: test: f is a plain function: write @operator(*) before it*",
    ),
    "two ways to say a shape": (
        '@kernel_case((4, 4, 4), "fp32", op="gemm", shapes=[(4, 4, 4)])\ndef test(kernel_gate): ...',
        "*takes a shape or shapes=, not both*",
    ),
    "no shape": (
        '@kernel_case(dtype="fp32", op="gemm")\ndef test(kernel_gate): ...',
        "*a shape is a sequence of sizes*",
    ),
}


@pytest.mark.parametrize(("text", "line"), COLLECTED.values(), ids=COLLECTED)
def test_what_is_seen_at_collection(pytester: pytest.Pytester, text: str, line: str) -> None:
    pytester.makepyfile(test_it=f"from pytest_klineage import kernel_case, operator\n{text}\n")
    result = pytester.runpytest("--collect-only", "-q", "-p", "no:cacheprovider")
    assert result.ret != 0
    result.stdout.fnmatch_lines([line])
    result.stdout.no_fnmatch_line("*Traceback*")
    result.stdout.no_fnmatch_line("*pytest_klineage[/.]*")


REFERENCES = (
    DEFINITIONS
    + """
import mylib

def pack(x):
    return x.t().contiguous()

@kernel_case((40, 33), "fp32", op=softmax, ref="mylib:slow", variants=["mylib:fast", before], **EASY)
def test_variants(kernel_gate):
    facts = kernel_gate("softmax.cpp").reference
    assert facts["variant"] != "mylib.py:slow"
    assert {name for name in facts if name.startswith("variant_ms.")} == {
        "variant_ms.mylib.py:slow", "variant_ms.mylib.py:fast", "variant_ms.test_refs.py:before"}

@kernel_case((40, 33), "fp32", op=softmax, ref="mylib.py:transposed", prepare=pack, **EASY)
def test_preparation(kernel_gate):
    verdict = kernel_gate("softmax.cpp")
    assert verdict.reference["label"] == "mylib.py:transposed"

@kernel_case((12, 20), "fp32", op=add_norm, ref="mylib:add_norm", **EASY)
def test_in_place(kernel_gate):
    kernel_gate("add_norm.cpp")

@kernel_case((12, 20), "fp32", op=softmax, ref="no_such_package.ops:softmax", **EASY)
def test_absent(kernel_gate):
    kernel_gate("softmax.cpp")

@kernel_case((12, 20), "fp32", op=softmax, ref="mylib:raises", **EASY)
def test_raises(kernel_gate):
    kernel_gate("softmax.cpp")

@kernel_case((12, 20), "fp32", op=softmax, ref="mylib:nothing", **EASY)
def test_nothing(kernel_gate):
    kernel_gate("softmax.cpp")

@kernel_case((16, 16, 16), "fp32", op="gemm", ref="mylib:gemm", **EASY)
def test_a_shipped_operator(kernel_gate):
    kernel_gate("good.cpp")
"""
)
MYLIB = """
import time
import torch

def slow(x):
    time.sleep(0.02)
    return torch.softmax(x, -1)

def fast(x, *, out):
    torch.softmax(x, -1, out=out)

def transposed(x):
    return torch.softmax(x, 0).t()

def add_norm(x, residual, w, eps):
    residual += x
    x.copy_(residual * torch.rsqrt(residual.square().mean(-1, keepdim=True) + eps) * w)

def gemm(a, b):
    return a @ b

def raises(x):
    raise ValueError("not today")
"""


def test_references_in_a_users_words(
    own: Path, kernels: Path, pytester: pytest.Pytester, quick: tuple[str, ...]
) -> None:
    pytester.makepyfile(mylib=MYLIB, test_refs=REFERENCES)
    result = pytester.runpytest_subprocess(*quick, "--klineage-platform=cpu", "-rs")
    result.assert_outcomes(passed=4, skipped=1, failed=2)
    result.stdout.fnmatch_lines([
        "klineage: mylib.py:22: ValueError: not today (the reference mylib.py:raises)",
        "klineage: mylib.py has no function 'nothing' (the reference mylib.py:nothing)",
    ])  # fmt: skip
    result.stdout.no_fnmatch_line("*Traceback*")
    result.stdout.fnmatch_lines(["*skipped.missing_dependency*no_such_package*"])


@pytest.mark.nightly
def test_the_definition_compiled(own: Path, pytester: pytest.Pytester, quick: tuple[str, ...]) -> None:
    pytester.makepyfile(
        test_compiled=DEFINITIONS + '\n@kernel_case((12, 20), "fp32", op=softmax, ref="torch.compile", **EASY)\n'
        "def test(kernel_gate):\n"
        '    assert "torch.compile, max-autotune" in kernel_gate("softmax.cpp").reference["label"]\n'
    )
    pytester.runpytest_subprocess(*quick, "--klineage-platform=cpu").assert_outcomes(passed=1)
