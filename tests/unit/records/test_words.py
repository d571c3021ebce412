"""What the records mean: ids, digests, platforms, codes, intervals, verdicts, usage, signatures."""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_klineage.errors import UnknownName, UsageError
from pytest_klineage.records import (
    DTYPES,
    PLATFORMS,
    Code,
    Interval,
    KernelCase,
    KernelSource,
    Reason,
    SourceFile,
    Status,
    Surface,
    TensorSpec,
    Timing,
    Usage,
    Verdict,
    platform_name,
    speedup,
)
from pytest_klineage.records.signature import contiguous_strides, dense, permuted
from pytest_klineage.records.source import SUFFIXES

SOURCE = KernelSource(
    surface=Surface.CPP,
    files=(SourceFile("kernel.cpp", "int x;"), SourceFile("tile.h", "#define T 4")),
    entry="run",
    flags=("-O3",),
)
SHAPES = st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple)
POSITIVE = st.floats(1e-3, 1e3)


def case(**fields: Any) -> KernelCase:
    given: dict[str, Any] = {"operator": "gemm", "shape": {"M": 64, "N": 32, "K": 16}, "dtype": "fp32"}
    return KernelCase(**(given | {"reference": "torch"} | fields))


class TestCase:
    def test_the_id_names_operator_shape_and_dtype(self) -> None:
        assert case().id == "gemm-64x32x16-fp32"

    def test_options_end_the_id_in_alphabetical_order(self) -> None:
        options = {"window": 128, "causal": True, "layout": "bhsd", "bias": False}
        assert case(options=options).id == "gemm-64x32x16-fp32-bias=False-causal-bhsd-window=128"

    def test_the_id_ignores_the_order_of_options(self) -> None:
        assert case(options={"a": 1, "b": 2}).id == case(options={"b": 2, "a": 1}).id

    def test_the_id_does_not_depend_on_what_is_only_required(self) -> None:
        assert case(at_least=2.0, reference="other").id == case().id

    @pytest.mark.parametrize("value", [0.0, -1.0])
    def test_a_required_speedup_is_positive(self, value: float) -> None:
        with pytest.raises(UsageError, match="at_least must be positive"):
            case(at_least=value)

    def test_another_shape_keeps_all_but_further_shapes(self) -> None:
        other = {"M": 1, "N": 2, "K": 3}
        moved = case(options={"causal": True}, at_least=2.0, also_shapes=(other,)).at_shape(other)
        assert moved == case(shape=other, options={"causal": True}, at_least=2.0)


class TestSource:
    def test_the_digest_is_a_sha256(self) -> None:
        assert len(SOURCE.digest) == 64
        assert int(SOURCE.digest, 16) >= 0

    @pytest.mark.parametrize(
        "change",
        [
            {"surface": Surface.CUDA},
            {"entry": "other"},
            {"flags": ("-O2",)},
            {"flags": ()},
            {"flags": ("-O3", "-g")},
            {"module": "package.module"},
            {"files": SOURCE.files[:1]},
            {"files": SOURCE.files[::-1]},
            {"files": (SourceFile("kernel.cpp", "int x; "), SOURCE.files[1])},
            {"files": (SourceFile("kernel2.cpp", "int x;"), SOURCE.files[1])},
            {"files": (SOURCE.files[0], SourceFile("tile.h", "#define T 8"))},
        ],
    )
    def test_the_digest_changes_with_every_field_that_counts(self, change: dict[str, Any]) -> None:
        assert msgspec.structs.replace(SOURCE, **change).digest != SOURCE.digest

    def test_the_digest_does_not_change_with_the_label(self) -> None:
        assert msgspec.structs.replace(SOURCE, label="expert").digest == SOURCE.digest

    def test_text_cannot_move_from_one_file_to_the_next_unnoticed(self) -> None:
        left = msgspec.structs.replace(SOURCE, files=(SourceFile("a", "xy"), SourceFile("b", "")))
        right = msgspec.structs.replace(SOURCE, files=(SourceFile("a", "x"), SourceFile("b", "y")))
        assert left.digest != right.digest

    def test_the_first_file_is_the_main_one(self) -> None:
        assert SOURCE.main == SOURCE.files[0]
        assert msgspec.structs.replace(SOURCE, files=()).main is None

    @pytest.mark.parametrize(
        "name",
        ["", ".", "..", "/etc/passwd", "../kernel.cpp", "a/b.h", "a\0.h", "-fplugin=x.so", "@arguments", ".hidden"],
    )
    def test_a_file_name_that_is_a_path_or_an_option_is_refused(self, name: str) -> None:
        with pytest.raises(UsageError, match="plain name"):
            SourceFile(name, "")

    @pytest.mark.parametrize("name", ["kernel.cu", "00-naive.cu", "my kernel.cpp", "a", "x..y", "_tile.h"])
    def test_plain_file_names_are_accepted(self, name: str) -> None:
        assert SourceFile(name, "").name == name

    def test_every_suffix_stands_for_one_surface(self) -> None:
        assert SUFFIXES[".cu"] is Surface.CUDA
        assert SUFFIXES[".cpp"] is Surface.CPP
        assert SUFFIXES[".py"] is Surface.PYTHON
        assert all(suffix.startswith(".") for suffix in SUFFIXES)


class TestPlatform:
    @pytest.mark.parametrize("name", PLATFORMS)
    def test_canonical_names_stand_for_themselves(self, name: str) -> None:
        assert platform_name(name) == platform_name(name.upper()) == name

    @pytest.mark.parametrize(
        ("alias", "name"), [("sm90a", "sm90"), ("sm_90", "sm90"), ("sm_120a", "sm120"), ("SM_103f", "sm103")]
    )
    def test_aliases_stand_for_a_platform(self, alias: str, name: str) -> None:
        assert platform_name(alias) == platform_name(alias.upper()) == name
        assert name in PLATFORMS

    @pytest.mark.parametrize("name", ["", "gpu", "sm75", "auto", "sm90 "])
    def test_other_names_are_refused_with_the_valid_ones(self, name: str) -> None:
        with pytest.raises(UnknownName) as caught:
            platform_name(name)
        assert all(valid in str(caught.value) for valid in (*PLATFORMS, "auto"))


class TestCodes:
    @pytest.mark.parametrize("code", Code)
    def test_every_code_begins_with_its_status(self, code: Code) -> None:
        status, dot, detail = code.value.partition(".")
        assert (dot, code.status) == (".", Status(status))
        assert detail
        assert detail == detail.lower()

    @pytest.mark.parametrize("status", Status)
    def test_every_status_has_a_code(self, status: Status) -> None:
        assert any(code.status is status for code in Code)


class TestInterval:
    @given(estimate=POSITIVE, below=POSITIVE, above=POSITIVE)
    def test_the_half_width_is_relative_to_the_estimate(self, estimate: float, below: float, above: float) -> None:
        interval = Interval(estimate, estimate - below, estimate + above)
        assert math.isclose(interval.half_width, (below + above) / 2 / estimate, rel_tol=1e-6, abs_tol=1e-9)

    @given(values=st.lists(POSITIVE, min_size=3, max_size=3).map(sorted), factor=POSITIVE)
    def test_the_half_width_does_not_depend_on_the_unit(self, values: list[float], factor: float) -> None:
        low, middle, high = values
        scaled = Interval(middle * factor, low * factor, high * factor)
        assert math.isclose(scaled.half_width, Interval(middle, low, high).half_width, rel_tol=1e-9, abs_tol=1e-12)

    def test_an_estimate_of_zero_is_never_precise(self) -> None:
        assert Interval(0.0, -1.0, 1.0).half_width == math.inf


def timing() -> Timing:
    return Timing(
        policy="paired",
        reference_ms=2.0,
        candidate_ms=1.0,
        speedup=Interval(2.0, 1.9, 2.1),
        reference_samples_ms=(2.0,),
        candidate_samples_ms=(1.0,),
        warmup=3,
        flush_bytes=0,
        statistic="",
    )


def verdict(code: Code, **fields: Any) -> Verdict:
    reasons = (Reason(code=code, message=""), Reason(code=Code.MISMATCH, message="further"))
    return Verdict(case=case(), status=code.status, reasons=reasons, **fields)


class TestVerdict:
    @pytest.mark.parametrize("code", Code)
    def test_the_first_reason_decides(self, code: Code) -> None:
        assert verdict(code).code is code

    @pytest.mark.parametrize("code", Code)
    def test_only_accepted_and_inconclusive_kernels_pass(self, code: Code) -> None:
        assert verdict(code, timing=timing()).ok == (code.value.partition(".")[0] in ("accepted", "inconclusive"))

    @pytest.mark.parametrize("code", Code)
    def test_only_right_and_timed_kernels_are_scored(self, code: Code) -> None:
        right = code.status in (Status.ACCEPTED, Status.SLOWER, Status.INCONCLUSIVE)
        assert verdict(code, timing=timing()).scored == right
        assert not verdict(code).scored

    @given(reference_ms=POSITIVE, candidate_ms=POSITIVE)
    def test_speedup_is_reference_over_candidate(self, reference_ms: float, candidate_ms: float) -> None:
        ratio = speedup(reference_ms, candidate_ms)
        assert (ratio > 1) == (candidate_ms < reference_ms) or math.isclose(ratio, 1)
        assert math.isclose(ratio * speedup(candidate_ms, reference_ms), 1, rel_tol=1e-12)


USAGES = st.builds(
    Usage,
    model=st.sampled_from(["a", "b"]),
    input_tokens=st.integers(0, 10**9),
    output_tokens=st.integers(0, 10**9),
    cache_read_tokens=st.integers(0, 10**9),
    cache_write_tokens=st.integers(0, 10**9),
    cost_usd=st.integers(0, 10**6).map(lambda cents: cents / 64),
    estimated=st.booleans(),
)


class TestUsage:
    @given(USAGES, USAGES, USAGES)
    def test_addition_does_not_depend_on_order_or_grouping(self, a: Usage, b: Usage, c: Usage) -> None:
        assert a + b == b + a
        assert (a + b) + c == a + (b + c)

    @given(USAGES, USAGES)
    def test_every_figure_is_added(self, a: Usage, b: Usage) -> None:
        total = a + b
        for name in Usage.__struct_fields__:
            if name not in ("model", "estimated"):
                assert getattr(total, name) == getattr(a, name) + getattr(b, name)

    @given(USAGES, USAGES)
    def test_one_estimate_makes_the_sum_an_estimate(self, a: Usage, b: Usage) -> None:
        assert (a + b).estimated == (a.estimated or b.estimated)

    @given(USAGES, USAGES)
    def test_a_sum_over_several_models_says_so(self, a: Usage, b: Usage) -> None:
        assert (a + b).model == (a.model if a.model == b.model else "mixed")

    @given(USAGES)
    def test_nothing_more_changes_nothing(self, usage: Usage) -> None:
        assert usage + Usage(model=usage.model) == usage


class TestSignature:
    @given(SHAPES)
    def test_a_dense_tensor_is_row_major(self, shape: tuple[int, ...]) -> None:
        spec = dense("x", "fp32", *shape)
        assert spec.strides[-1] == 1
        assert spec.num_elements == math.prod(shape) == spec.strides[0] * shape[0]

    @given(st.data())
    def test_a_permuted_tensor_visits_every_element_once(self, data: st.DataObject) -> None:
        shape = data.draw(SHAPES)
        spec = permuted("x", "fp32", shape, tuple(data.draw(st.permutations(range(len(shape))))))
        positions = [0]
        for size, step in zip(spec.shape, spec.strides, strict=True):
            positions = [position + index * step for position in positions for index in range(size)]
        assert sorted(positions) == list(range(math.prod(shape)))

    @given(SHAPES)
    def test_the_identity_order_is_dense(self, shape: tuple[int, ...]) -> None:
        order = tuple(range(len(shape)))
        assert permuted("x", "fp32", shape, order).strides == contiguous_strides(shape)

    def test_the_outermost_axis_of_the_order_has_the_largest_stride(self) -> None:
        assert permuted("x", "bf16", (2, 3, 5), (2, 0, 1)).strides == (3, 1, 6)

    def test_a_scalar_tensor_has_one_element(self) -> None:
        assert TensorSpec(name="x", dtype="fp32", shape=(), strides=()).num_elements == 1

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_the_name_of_every_dtype_says_its_size(self, dtype: str) -> None:
        found = re.search(r"\d+", dtype)
        assert DTYPES[dtype] * 8 == (int(found[0]) if found else {"bool": 8}[dtype])
