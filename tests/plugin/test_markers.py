"""The kernel_case marker: typos cost nothing but a message."""

from __future__ import annotations

from pathlib import Path

import pytest

TYPOS = {
    "operator": ('(8, 8, 8), "fp32", op="gem"', "*unknown operator 'gem'. Did you mean 'gemm'? Valid: conv2d, *topk."),
    "no operator": ('(8, 8, 8), "fp32"', "*kernel_case needs op=, the operator: one of conv2d, *, gemm, topk, or one*"),
    "operator of another type": ('(8, 8, 8), "fp32", op=["gemm"]', "*unknown operator *gemm*"),
    "reference of another type": ('(8, 8, 8), "fp32", ref=["torch"], op="gemm"', "*unknown reference *torch*"),
    "dtype": ('(8, 8, 8), "f32", op="gemm"', "*unknown dtype for gemm 'f32'. *Valid: *fp32*"),
    "reference": (
        '(8, 8, 8), "fp32", ref="cublass", op="gemm"',
        "*unknown reference 'cublass'. *Valid: cublas, *torch*",
    ),
    "argument": (
        '(8, 8, 8), "fp32", op="gemm", refs="torch"',
        "*unknown argument of kernel_case for gemm 'refs'*ref,*",
    ),
    "option value": (
        '(1, 8, 64, 64), "fp32", op="fmha", causal="yes"',
        "*unknown value for fmha option 'causal' 'yes'*Valid: False, True*",
    ),
    "axes": ('(8, 8), "fp32", op="gemm"', "*gemm has 3 axes (*), got 2 sizes: (8, 8)*"),
    "axis name": ('{"M": 8, "N": 8, "Q": 8}, "fp32", op="gemm"', "*unknown axis of gemm 'Q'. Valid: K, M, N*"),
    "size": ('(8, 8, 0), "fp32", op="gemm"', "*must be a positive integer, got 0*"),
    "shape": ('8, "fp32", op="gemm"', "*a shape is a sequence of sizes or a dict by axis name, got 8*"),
    "also": ('(8, 8, 8), "fp32", op="gemm", also=[(8, 8)]', "*gemm has 3 axes*"),
    "also, one shape": ('(8, 8, 8), "fp32", op="gemm", also=(8, 8, 8)', "*a shape is a sequence of sizes *got 8*"),
    "also, a number": ('(8, 8, 8), "fp32", op="gemm", also=8', "*also= is a list of shapes, *got 8*"),
    "at_least": ('(8, 8, 8), "fp32", op="gemm", at_least=0', "*at_least must be a positive number, got 0*"),
    "at_least as text": ('(8, 8, 8), "fp32", op="gemm", at_least="2"', "*at_least must be a positive number, got '2'*"),
    "at_least is a flag": ('(8, 8, 8), "fp32", op="gemm", at_least=True', "*positive number, got True*"),
    "at_least is NaN": ('(8, 8, 8), "fp32", op="gemm", at_least=float("nan")', "*positive number, got nan*"),
    "library": ('(8, 8, 8), "fp32", op="gemm", library="forbit"', "*library*forbit*forbid*"),
}


@pytest.mark.parametrize("name", TYPOS)
def test_a_typo_is_found_at_collection(kernels: Path, pytester: pytest.Pytester, name: str) -> None:
    arguments, message = TYPOS[name]
    pytester.makepyfile(
        f"""
        import pytest

        @pytest.mark.kernel_case({arguments})
        def test_kernel(kernel_gate):
            kernel_gate("good.cpp")
        """
    )
    result = pytester.runpytest("--klineage-cache-dir=cache")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines([message])
    result.stdout.no_fnmatch_line("*Traceback*")
    assert not (kernels / "cache").exists()
    assert not (kernels / "results").exists()


@pytest.mark.parametrize("arguments", ['(8, 8, 8), "fp32"', '(8, 8, 8), "fp32", op="gemm", also=8'])
def test_the_decorator_leaves_mistakes_to_collection(pytester: pytest.Pytester, arguments: str) -> None:
    pytester.makepyfile(
        f"""
        from pytest_klineage import kernel_case

        @kernel_case({arguments})
        def test_kernel(kernel_gate):
            pass
        """
    )
    result = pytester.runpytest()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        ["*:3: test_kernel: *op=, the operator: one of *" if "op" not in arguments else "*also=*"]
    )
    result.stdout.no_fnmatch_line("*Traceback*")
    result.stdout.no_fnmatch_line("*markers.py*")


def test_a_typo_is_found_by_workers_as_well(kernels: Path, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        from pytest_klineage import kernel_case

        @kernel_case((8, 8, 8), "fp32", op="gem")
        def test_kernel(kernel_gate):
            kernel_gate("good.cpp")
        """
    )
    result = pytester.runpytest("-n2")
    assert result.ret != pytest.ExitCode.OK
    result.stdout.fnmatch_lines(["*unknown operator 'gem'. Did you mean 'gemm'?*"])
    result.stdout.no_fnmatch_line("*INTERNALERROR*")


def test_a_typo_in_one_parameter_is_found(kernels: Path, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest
        from pytest_klineage import kernel_case

        @pytest.mark.parametrize("n", [pytest.param(1, marks=kernel_case((8, 8, 8), "fp32", op="gem")), 2])
        def test_kernel(n, kernel_gate):
            kernel_gate("good.cpp")
        """
    )
    result = pytester.runpytest()
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(["*test_kernel?1?: unknown operator 'gem'*"])


def test_the_nearest_marker_wins_and_the_case_is_a_fixture(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest
        from pytest_klineage import kernel_case

        @kernel_case((8, 8, 8), "fp32", op="gemm", at_least=0.5, library="label", also=[(4, 4, 4), (9, 5, 3)])
        class TestKernels:
            def test_outer(self, klineage_case):
                assert klineage_case.id == "gemm-8x8x8-fp32"
                assert klineage_case.at_least == 0.5
                assert klineage_case.library == "label"
                assert [list(shape.values()) for shape in klineage_case.also_shapes] == [[4, 4, 4], [9, 5, 3]]

            @kernel_case({"S": 16, "B": 1, "H": 2, "D": 8}, "fp32", op="fmha", causal=True)
            def test_inner(self, klineage_case):
                assert klineage_case.id == "fmha-1x2x16x8-fp32-causal"

        def test_none(klineage_case):
            pass
        """
    )
    result = pytester.runpytest()
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(["*klineage_case needs a kernel_case marker*", "*2 passed, 1 error*"])
