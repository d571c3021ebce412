"""KernelBench problems: what is read from running them, which are refused and why, and candidates as kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_klineage.errors import HarnessError, UsageError
from pytest_klineage.formats import Imported, Unsupported, candidate_of, lint_imported, read_problem, read_problems
from pytest_klineage.formats.describing import started
from pytest_klineage.formats.imported import check_scorable, is_lintable
from pytest_klineage.operators import operator_of
from pytest_klineage.operators.tolerance import Expected
from pytest_klineage.records import Surface

HEAD = "import torch\nimport torch.nn as nn\nimport torch.nn.functional as F\n"
MATMUL = f"""{HEAD}
class Model(nn.Module):
    def __init__(self):
        super(Model, self).__init__()

    def forward(self, A, B):
        return torch.matmul(A, B)

M = 256
N = 128 * 4
K = M // 2

def get_inputs():
    return [torch.rand(M, K), torch.rand(K, N)]

def get_init_inputs():
    return []
"""
NORM = f"""{HEAD}
class Model(nn.Module):
    def __init__(self, channels, factor):
        super().__init__()
        self.conv = nn.Conv2d(channels, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.register_buffer("shift", torch.arange(4.0))
        self.factor = factor

    def forward(self, x, scale):
        return self.norm(self.conv(x)) * self.factor * scale + self.shift[:, None, None]

batch, channels, side = 8, 6, 12

def get_inputs():
    return [torch.rand(batch, channels, side, side), 1.5]

def get_init_inputs():
    return [channels, (2.0,)[0]]
"""


def written(tmp_path: Path, text: str, name: str = "1_problem") -> Path:
    path = tmp_path / f"{name}.py"
    path.write_text(text)
    return path


def imported(tmp_path: Path, text: str, **settings: Any) -> Imported:
    return read_problem(written(tmp_path, text), tmp_path / "imported", **settings)


def drawn(found: Imported, input_distribution: str = "", seed: int = 0) -> dict[str, torch.Tensor]:
    chosen = operator_of(found.case)
    return chosen.make_inputs(
        found.case, torch.Generator().manual_seed(seed), input_distribution or chosen.input_distributions[0]
    )


def test_a_problem_is_an_operator_in_a_file(tmp_path: Path) -> None:
    found = imported(tmp_path, MATMUL)
    chosen = operator_of(found.case)
    signature = chosen.signature(found.case)
    assert {spec.name: spec.shape for spec in signature.inputs} == {"A": (256, 128), "B": (128, 512)}
    assert [(spec.name, spec.shape, spec.dtype) for spec in signature.outputs] == [("y", (256, 512), "fp32")]
    assert found.case.shape == {"M": 256, "K": 128, "N": 512}
    assert found.case.definition is not None
    assert found.file == tmp_path / "imported" / "kb_1_problem.py"
    inputs = drawn(found)
    torch.testing.assert_close(
        chosen.oracle(found.case, inputs)["y"], inputs["A"].double() @ inputs["B"].double(), rtol=1e-12, atol=1e-12
    )


def test_sizes_are_set_and_what_follows_from_them_follows(tmp_path: Path) -> None:
    assert imported(tmp_path, MATMUL, sizes={"M": "32"}).case.shape == {"M": 32, "K": 16, "N": 512}
    found = imported(tmp_path, MATMUL, sizes={"N": 24}, at_most=10)
    assert (found.case.shape, found.sizes) == ({"M": 8, "K": 4, "N": 24}, {"M": "8", "N": "24"})
    assert imported(tmp_path, NORM, at_most=7).case.shape == {"batch": 4, "channels": 3, "side": 6}
    tuples = MATMUL.replace("M = 256", "shape = (40, 97)\nM, L = shape")
    assert imported(tmp_path, tuples, at_most=16).case.shape["M"] == 10


@pytest.mark.parametrize("at_most", [16, 64])
def test_groups_stay_fewer_than_their_channels(tmp_path: Path, at_most: int) -> None:
    grouped = NORM.replace("nn.BatchNorm2d(4)", "nn.GroupNorm(groups, wide)").replace(
        "channels, 4, 3", "channels, wide, 3"
    )
    found = imported(
        tmp_path, f"{grouped}\nwide, groups = 4096, 64\n".replace("arange(4.0)", "arange(float(wide))"), at_most=at_most
    )
    assert (found.sizes["wide"], found.sizes["groups"]) == (str(at_most), str(at_most // 2))
    assert check_scorable(found) is found


@pytest.mark.parametrize(
    ("sizes", "why"), [({"Q": "1"}, "unknown size at the top of the file 'Q'"), ({"M": "x("}, "M must be a number")]
)
def test_a_size_that_cannot_be_is_named(tmp_path: Path, sizes: dict[str, str], why: str) -> None:
    with pytest.raises(Unsupported, match=why):
        imported(tmp_path, MATMUL, sizes=sizes)


def test_parameters_become_inputs_with_the_problems_own_scale(tmp_path: Path) -> None:
    found = imported(tmp_path, NORM)
    weights = {"conv.weight": "conv_weight", "conv.bias": "conv_bias", "norm.weight": "norm_weight",
               "norm.bias": "norm_bias", "shift": "shift"}  # fmt: skip
    assert (found.weights, found.arguments) == (weights, ("x", "scale"))
    assert operator_of(found.case).signature(found.case).scalars["scale"] == 1.5
    inputs, as_written = drawn(found), drawn(found, "as_written")
    assert bool((inputs["x"] < 0).any())
    assert not bool((as_written["x"] < 0).any())
    assert float(inputs["conv_weight"].abs().max()) <= 54**-0.5
    assert float((inputs["norm_weight"] - 1).abs().max()) <= 0.5
    assert not torch.equal(inputs["norm_weight"], torch.ones(4))
    assert torch.equal(as_written["norm_weight"], torch.ones(4))
    again = drawn(found)
    assert all(torch.equal(again[name], tensor) for name, tensor in inputs.items())
    assert not torch.equal(drawn(found, seed=1)["conv_weight"], inputs["conv_weight"])


def test_statistics_are_inputs_in_evaluation_mode(tmp_path: Path) -> None:
    names = imported(tmp_path, NORM, training=False).weights
    assert {"norm.running_mean", "norm.running_var"} <= names.keys()
    assert "norm.num_batches_tracked" not in names


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("precision", ["", "bf16"])
def test_the_definition_computes_what_the_module_does(tmp_path: Path, training: bool, precision: str) -> None:
    found = imported(tmp_path, NORM, training=training, precision=precision)
    namespace: dict[str, Any] = {}
    exec(NORM, namespace)
    inputs = drawn(found)
    module = namespace["Model"](6, 2.0).train(training).double()
    module.load_state_dict({theirs: inputs[ours] for theirs, ours in found.weights.items()}, strict=False)
    expected = module(inputs["x"].double(), 1.5).detach()
    chosen = operator_of(found.case)
    torch.testing.assert_close(chosen.oracle(found.case, inputs)["y"], expected)
    assert Expected(chosen, found.case, inputs).accepts(chosen.baseline_output(found.case, inputs))
    assert chosen.baseline_output(found.case, inputs)["y"].dtype is (torch.bfloat16 if precision else torch.float32)


def test_other_sizes_are_another_definition(tmp_path: Path) -> None:
    first, second = (imported(tmp_path, MATMUL, sizes={"M": size}).case.definition for size in (16, 32))
    assert first is not None
    assert second is not None
    assert first.digest != second.digest


@pytest.mark.parametrize(
    ("text", "change", "why"),
    [
        (MATMUL, ("class Model(", "class Modell("), "it defines no Model"),
        (MATMUL, ("def get_init_inputs", "def get_init"), "it defines no get_init_inputs"),
        (MATMUL, ("import torch\n", "import (\n"), "SyntaxError"),
        (MATMUL, ("torch.rand(K, N)]", "'text']"), "forward takes a str"),
        (MATMUL, ("return torch.matmul(A, B)", "return None"), "forward returns NoneType, not tensors"),
        (MATMUL, ("torch.rand(M, K)", "torch.rand(M, M)"), "RuntimeError"),
        (MATMUL, ("M = 256", "M = 256\nimport no_such_package"), "ModuleNotFoundError"),
        (MATMUL, ("M = 256", "import os\nos._exit(3)"), "it ended"),
        (MATMUL, ("torch.rand(M, K)", "torch.rand(M, K, dtype=torch.complex64)"), "complex64"),
        (NORM, ("nn.BatchNorm2d(4)", "nn.Dropout(0.5)"), "its answer is random: norm is Dropout in training mode"),
        (NORM, ("self.factor = factor", "self.factor = torch.rand(1)"), "the tensor factor is an attribute"),
    ],
)  # fmt: skip
def test_what_cannot_be_an_operator_is_refused(tmp_path: Path, text: str, change: tuple[str, str], why: str) -> None:
    assert change[0] in text
    with pytest.raises(Unsupported) as refused:
        imported(tmp_path, text.replace(*change))
    assert str(refused.value).startswith("unsupported: 1_problem: ")
    assert why in str(refused.value)


def test_dropout_is_nothing_in_evaluation_mode(tmp_path: Path) -> None:
    found = imported(tmp_path, NORM.replace("nn.BatchNorm2d(4)", "nn.Dropout(0.5)"), training=False)
    assert lint_imported(found) == ()


def test_a_problem_that_needs_values_is_run_on_the_cpu(tmp_path: Path) -> None:
    found = imported(tmp_path, MATMUL.replace("matmul(A, B)", "matmul(A, B) * A.sum().item()"))
    assert found.case.shape["M"] == 256


def test_a_device_that_is_named_is_not_asked_for(tmp_path: Path) -> None:
    found = imported(tmp_path, MATMUL.replace("rand(M, K)", "rand(M, K, device='cuda').cuda()"))
    assert drawn(found)["A"].device.type == "cpu"


def test_one_that_fails_leaves_the_others(tmp_path: Path) -> None:
    paths = [written(tmp_path, MATMUL, "one"), tmp_path / "none.py", written(tmp_path, "x = 1", "two")]
    first, second, third = read_problems(paths, tmp_path / "imported")
    assert isinstance(first, Imported)
    assert "cannot be read" in str(second)
    assert isinstance(third, Unsupported)
    with pytest.raises(UsageError, match="cannot be read"):
        read_problem(tmp_path / "none.py", tmp_path)


def test_null_models_do_not_pass_what_is_imported(tmp_path: Path) -> None:
    small = imported(tmp_path, MATMUL, at_most=32)
    assert lint_imported(small) == ()
    assert check_scorable(small) is small
    relu = MATMUL.replace("torch.matmul(A, B)", "torch.relu(A)")
    with pytest.raises(Unsupported, match="input B does not influence outputs"):
        check_scorable(imported(tmp_path, relu, at_most=32))
    zero = MATMUL.replace("torch.matmul(A, B)", "torch.relu(-torch.matmul(A, B).square())")
    with pytest.raises(Unsupported, match=r"answers that compute nothing would pass: .*zeros"):
        check_scorable(imported(tmp_path, zero, at_most=32))
    huge = imported(tmp_path, MATMUL, sizes={"M": 65536})
    assert not is_lintable(huge.case)
    assert lint_imported(huge) == ()


def test_a_parameter_without_influence_is_the_problems_own(tmp_path: Path) -> None:
    # Batch statistics cancel the convolution's bias.
    assert lint_imported(imported(tmp_path, NORM)) == ()


def test_a_candidate_gets_an_adapter(tmp_path: Path) -> None:
    found = imported(tmp_path, NORM)
    source = candidate_of(NORM.replace("class Model(", "class ModelNew("), found, "mine")
    assert (source.surface, source.entry, source.label) == (Surface.PYTHON, "klineage_run", "mine")
    namespace: dict[str, Any] = {}
    exec(source.files[0].text, namespace)
    chosen = operator_of(found.case)
    for seed in range(2):
        inputs = drawn(found, seed=seed)
        result = namespace["klineage_run"](*inputs.values(), scale=1.5)
        assert Expected(chosen, found.case, inputs).accepts({"y": result})
    triton = candidate_of("import triton\nclass ModelNew: pass\n", found)
    assert triton.surface is Surface.TRITON
    for text in (NORM, "def ("):
        with pytest.raises(Unsupported):
            candidate_of(text, found)


def test_a_server_that_has_ended_is_replaced(tmp_path: Path) -> None:
    path = written(tmp_path, MATMUL)
    read_problem(path, tmp_path / "imported")
    started().process.kill()
    started().process.wait()
    with pytest.raises(HarnessError, match="the process that runs problems has ended"):
        read_problem(path, tmp_path / "imported")
    assert isinstance(read_problem(path, tmp_path / "imported"), Imported)
