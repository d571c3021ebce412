"""KernelBench problems: which become cases, which are refused and by what name; nothing of them is executed."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_klineage.errors import UsageError
from pytest_klineage.formats import Unsupported, candidate_of, import_problem, lint_imported, read_problem
from pytest_klineage.formats.imported import check_scorable, is_lintable
from pytest_klineage.operators import make_case
from pytest_klineage.records import Surface

HEAD = "import torch\nimport torch.nn as nn\nimport torch.nn.functional as F\n"
MATMUL = f'''{HEAD}
class Model(nn.Module):
    """A product."""

    def __init__(self):
        super(Model, self).__init__()

    def forward(self, A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        """Multiplies."""
        return torch.matmul(A, B)

M = 256
N = 128 * 4
K = M // 2

def get_inputs():
    A = torch.rand(M, K)
    B = torch.rand(K, N)
    return [A, B]

def get_init_inputs():
    return []  # nothing
'''
CONV = f"""{HEAD}
class Model(nn.Module):
    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, stride: int = 1, padding: int = 0,
                 dilation: int = 1, groups: int = 1, bias: bool = False):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, (kernel_size, kernel_size), stride=stride, padding=padding,
                              dilation=dilation, groups=groups, bias=bias)

    def forward(self, x):
        return self.conv(x)

def get_inputs():
    return [torch.randn(2, 8, 20, 24)]

def get_init_inputs():
    return [8, 16, 3, 2, 1]
"""
ATTENTION = f"""{HEAD}
class Model(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, Q, K, V):
        out = F.scaled_dot_product_attention(Q, K, V)
        return out

B, H, S, D = 2, 4, 64, 32

def get_inputs():
    Q = torch.rand(B, H, S, D, device='cuda', dtype=torch.float16)
    K = torch.rand(B, H, S, D, device='cuda', dtype=torch.float16)
    V = torch.rand(B, H, S, D, device='cuda').half()
    return [Q, K, V]

def get_init_inputs():
    return []
"""
TOPK = f"""{HEAD}
class Model(nn.Module):
    def __init__(self, k):
        super().__init__()
        self.k = k

    def forward(self, x):
        values, indices = torch.topk(x, self.k, dim=-1)
        return values, indices

def get_inputs():
    return [torch.rand(16, 100)]

def get_init_inputs():
    return [5]
"""


def test_a_product_is_a_gemm() -> None:
    found = import_problem(MATMUL, "2_Standard", precision="bf16")
    assert found.case == make_case("gemm", (256, 512, 128), "bf16", "torch")
    assert found.arguments == ("a", "b")
    assert found.weights == {}
    assert "inputs are drawn by the operator's own distributions, not by get_inputs" in found.notes


def test_a_layer_becomes_an_input() -> None:
    found = import_problem(CONV, "conv", reference="cudnn")
    assert found.case == make_case("conv2d", (2, 8, 20, 24, 16, 3, 2, 1), "fp32", "cudnn")
    assert found.arguments == ("x",)
    assert found.weights == {"conv.weight": "w"}
    assert found.constructor == (8, 16, 3, 2, 1)
    assert "conv.weight is an input here, not a parameter of a module" in found.notes


def test_attention_and_topk() -> None:
    assert import_problem(ATTENTION, "97").case == make_case("fmha", (2, 4, 64, 32), "fp16", "torch")
    found = import_problem(TOPK, "topk")
    assert found.case == make_case("topk", (16, 100, 5), "fp32", "torch")
    assert "any order of the k largest is right here" in found.notes


def test_comments_and_layout_are_not_the_problem_but_sizes_are() -> None:
    digest = import_problem(MATMUL, "one").digest
    assert import_problem(MATMUL.replace("# nothing", "# something"), "one").digest == digest
    assert import_problem(MATMUL.replace("M = 256", "M = 512"), "one").digest != digest


@pytest.mark.parametrize(
    ("text", "change", "why"),
    [
        (MATMUL, ("torch.matmul(A, B)", "torch.matmul(A.T, B)"), "no operator here takes a transposed matrix"),
        (MATMUL, ("torch.matmul(A, B)", "torch.relu(torch.matmul(A, B))"), "no operator here stands for torch.relu"),
        (MATMUL, ("torch.matmul(A, B)", "torch.matmul(torch.matmul(A, B), B)"), "another function has changed it"),
        (MATMUL, ("torch.matmul(A, B)", "A * B"), "arithmetic on tensors"),
        (MATMUL, ("torch.matmul(A, B)", "torch.matmul(A, A)"), "have no product"),
        (MATMUL, ("        return torch", "        if A.shape[0]:\n            A = B\n        return torch"), "If"),
        (MATMUL, ("A = torch.rand(M, K)", "A = torch.tril(torch.rand(M, K))"), "stands for torch.tril"),
        (MATMUL, ("A = torch.rand(M, K)", "A = torch.rand(4, M, K)"), "a product of 3 and 2 dimensions"),
        (MATMUL, ("M = 256", "M = int(open('size').read())"), "M is not known without executing it"),
        (MATMUL, ("M = 256", "M = 256\nif True:\n    M = 64"), "M is not known without executing it"),
        (MATMUL, ("M = 256", "M = 256\nM += 1"), "M is not known without executing it"),
        (MATMUL, ("M = 256", "M = 256\ntorch.matmul = torch.add"), "torch is not known without executing it"),
        (MATMUL, ("M = 256", "M = 256\ntorch.set_default_dtype(torch.float16)"), "may change what follows"),
        (MATMUL, ("M = 256", "M = 256\nfor _ in range(2):\n    print()"), "may change what follows"),
        (MATMUL, ("class Model(nn.Module)", "class Model(Base)"), "Base is not known"),
        (MATMUL, ("    def forward", "    __call__ = None\n\n    def forward"), "is no plain module"),
        (MATMUL, ("    def forward", "    @compiled\n    def forward"), "compiled is not known"),
        (MATMUL, ("class Model(", "class Modell("), "a class Model is not there"),
        (MATMUL, ("return [A, B]", "return [A, B, A]"), "forward takes 2 arguments, 3 are given"),
        (MATMUL, ("def get_init_inputs", "def get_init"), "a function get_init_inputs is not there"),
        (MATMUL, ("import torch\n", "import (\n"), "not valid Python"),
        (MATMUL, ("A: torch.Tensor, B", "A: torch.Tensor, unused, B"), "also needs B"),
        (CONV, ("bias: bool = False", "bias: bool = True"), "bias=False"),
        (CONV, ("groups: int = 1", "groups: int = 8"), "neither dilation nor groups"),
        (CONV, ("(kernel_size, kernel_size)", "(kernel_size, 1)"), "the same kernel_size in both directions"),
        (CONV, ("[8, 16, 3, 2, 1]", "[8, 16, 3, 2, 'same']"), "the same padding in both directions"),
        (CONV, ("[8, 16, 3, 2, 1]", "[4, 16, 3, 2, 1]"), "images [N,C,H,W]"),
        (CONV, ("[8, 16, 3, 2, 1]", "[8, 16, 3, 2, 3]"), "padding 3 must be smaller than the filter"),
        (ATTENTION, ("(Q, K, V)\n        return", "(Q, K, V, scale=2.0)\n        return"), "the scale 1/sqrt(D)"),
        (ATTENTION, (".half()", ""), "inputs of several types: fp16, fp32"),
        (ATTENTION, ("dtype=torch.float16", "dtype=torch.float8_e4m3fn"), "not a tensor of a known shape and type"),
        (TOPK, ("return values, indices", "return values"), "not the result of one known function"),
        (TOPK, ("return values, indices", "return indices, values"), "not the result of one known function"),
        (TOPK, ("dim=-1", "dim=0"), "the largest of every row"),
    ],
)  # fmt: skip
def test_what_is_not_the_same_is_refused_by_name(text: str, change: tuple[str, str], why: str) -> None:
    assert change[0] in text
    with pytest.raises(Unsupported) as refused:
        import_problem(text.replace(*change), "5_problem")
    assert str(refused.value).startswith("unsupported: 5_problem: ")
    assert why in str(refused.value)


def test_nothing_is_executed(tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    for place in ("M = 256", "    A = torch.rand(M, K)"):
        indent = place[: len(place) - len(place.lstrip())]
        text = MATMUL.replace(place, f"{place}\n{indent}open({str(witness)!r}, 'w')")
        with pytest.raises(Unsupported):
            import_problem(text, "evil")
    import_problem(f"{MATMUL}\nif __name__ == '__main__':\n    open({str(witness)!r}, 'w')\n", "guarded")
    assert not witness.exists()


@pytest.mark.parametrize("text", ["(" * 100_000, "x = " + "-" * 50_000 + "1", "a" * (1 << 21), "\0"])
def test_monsters_are_refused(text: str) -> None:
    with pytest.raises(Unsupported):
        import_problem(text, "monster")


def test_a_file_is_read_or_said_to_be_missing(tmp_path: Path) -> None:
    path = tmp_path / "2_Standard.py"
    path.write_text(MATMUL)
    assert read_problem(path).name == "2_Standard"
    with pytest.raises(UsageError, match="cannot be read"):
        read_problem(tmp_path / "3_Missing.py")


def test_null_models_do_not_pass_what_is_imported() -> None:
    small = import_problem(MATMUL.replace("M = 256", "M = 64"), "small")
    assert lint_imported(small) == ()
    assert check_scorable(small) is small
    # One number is its own mean: a constant is the right answer.
    dot = import_problem(MATMUL.replace("(M, K)", "(1, K)").replace("(K, N)", "(K, 1)"), "dot")
    assert "constant" in lint_imported(dot)
    with pytest.raises(Unsupported, match=r"answers that compute nothing would pass: .*constant"):
        check_scorable(dot)
    huge = import_problem(MATMUL.replace("M = 256", "M = 65536"), "huge")
    assert not is_lintable(huge.case)
    assert lint_imported(huge) == ()


def test_a_candidate_gets_an_adapter() -> None:
    candidate = CONV.replace("class Model(", "class ModelNew(")
    source = candidate_of(candidate, import_problem(CONV, "conv"), "mine")
    assert source.surface is Surface.PYTHON
    assert (source.entry, source.label) == ("klineage_run", "mine")
    text = source.files[0].text
    assert "def klineage_run(x, w):" in text
    assert "_klineage_model = ModelNew(*(8, 16, 3, 2, 1))" in text
    assert '_klineage_model.get_parameter("conv.weight").data = w' in text
    triton = candidate_of(f"import triton\n{candidate}", import_problem(CONV, "conv"))
    assert triton.surface is Surface.TRITON
    with pytest.raises(Unsupported, match="a class ModelNew is not there"):
        candidate_of(CONV, import_problem(CONV, "conv"))


def test_the_adapter_computes_what_the_problem_says() -> None:
    import torch

    candidate = CONV.replace("class Model(", "class ModelNew(")
    source = candidate_of(candidate, import_problem(CONV, "conv"))
    namespace: dict[str, object] = {}
    exec(source.files[0].text, namespace)
    x, w = torch.randn(2, 8, 20, 24), torch.randn(16, 8, 3, 3)
    run = namespace["klineage_run"]
    assert callable(run)
    for weights in (w, w + 1):
        expected = torch.nn.functional.conv2d(x, weights, stride=2, padding=1)
        torch.testing.assert_close(run(x, weights).detach(), expected)
