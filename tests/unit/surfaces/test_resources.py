"""Registers, spills and instructions from what compilers and disassemblers print, recorded from CUDA 13.0 and 13.2.

recorded/ptxas-sm90.txt and usage-sm90.txt are of one file with four functions, made for this; sass-sm90.txt and
sass-sm120.txt are lines of the gemm expert and of its stage 06.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_klineage.records import INSTRUCTIONS, Code, KernelResources
from pytest_klineage.surfaces import SurfaceFailure, resources
from pytest_klineage.surfaces.resources import OPCODES, parse_ptxas, parse_sass, parse_usage, with_instructions, words
from pytest_klineage.surfaces.toolkit import Disassembler

RECORDED = Path(__file__).parent / "recorded"


def recorded(name: str) -> str:
    return (RECORDED / f"{name}.txt").read_text()


class TestPtxas:
    def test_each_kernel_has_its_own_figures(self) -> None:
        kernels, rest = parse_ptxas(recorded("ptxas-sm90"))
        assert [(kernel.function, kernel.registers) for kernel in kernels] == [
            ("shared_tile", 34), ("wide", 64), ("plain", 10),
        ]  # fmt: skip
        shared_tile, wide, plain = kernels
        assert (shared_tile.static_shared_bytes, shared_tile.stack_bytes, shared_tile.spill_bytes) == (1024, 160, 0)
        assert (wide.spill_store_bytes, wide.spill_load_bytes, wide.spill_bytes) == (272, 292, 292)
        assert plain == KernelResources(name="plain", registers=10)
        assert rest == ""

    def test_a_called_function_counts_when_it_spills(self) -> None:
        text = recorded("ptxas-sm90")
        spilling = text.replace(
            "_Z6calledPKfi\n    0 bytes stack frame, 0 bytes spill stores",
            "_Z6calledPKfi\n    8 bytes stack frame, 8 bytes spill stores",
        )
        assert spilling != text
        (called,) = [kernel for kernel in parse_ptxas(spilling)[0] if kernel.function == "called"]
        assert (called.registers, called.spill_bytes) == (0, 8)

    def test_what_the_compiler_says_otherwise_is_kept(self) -> None:
        said = "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized"
        head, _, tail = recorded("ptxas-sm90").partition("ptxas info    : Used 64")
        kernels, rest = parse_ptxas(f"{head}{said}\nptxas info    : Used 64{tail}")
        assert rest == said
        assert [kernel.registers for kernel in kernels] == [34, 64, 10]

    @given(st.text())
    def test_any_text_is_something_else(self, text: str) -> None:
        kernels, rest = parse_ptxas(text)
        assert kernels == ()
        assert rest == "\n".join(text.splitlines())


class TestUsage:
    def test_it_agrees_with_the_assembler(self) -> None:
        def figures(kernels: tuple[KernelResources, ...]) -> list[tuple[str, int, int, int]]:
            return [(item.name, item.registers, item.stack_bytes, item.static_shared_bytes) for item in kernels]

        assert figures(parse_usage(recorded("usage-sm90"))) == figures(parse_ptxas(recorded("ptxas-sm90"))[0])

    def test_nothing_is_nothing(self) -> None:
        assert parse_usage("") == ()


class TestSass:
    def test_the_words_of_the_gemm_expert(self) -> None:
        (found,) = parse_sass(recorded("sass-sm90").splitlines()).values()
        assert found == (
            "cluster", "mbarrier", "multicast", "setmaxnreg", "stmatrix", "tma_load", "tma_store", "wgmma",
        )  # fmt: skip

    def test_the_words_of_a_stage_on_sm120(self) -> None:
        (found,) = parse_sass(recorded("sass-sm120").splitlines()).values()
        assert found == ("cp_async", "ldmatrix", "mma")

    def test_functions_are_kept_apart(self) -> None:
        text = [
            "\t\tFunction : a", "        /*0000*/              @!UP0 UTMALDG.2D [UR8], [UR4] ;  /* 0x0 */",
            "\t\tFunction : b", "        /*0010*/               @P0 HMMA.16816.F32 R4, R4, R5, R6 ;  /* 0x0 */",
            "        /* HGMMA in a comment */",
        ]  # fmt: skip
        assert parse_sass(text) == {"a": ("tma_load",), "b": ("mma",)}

    @pytest.mark.parametrize(
        ("opcode", "word"),
        [
            ("HGMMA", "wgmma"), ("QGMMA", "wgmma"), ("IGMMA", "wgmma"), ("HMMA", "mma"), ("IMMA", "mma"),
            ("DMMA", "mma"), ("QMMA", "mma"), ("OMMA", "mma"), ("LDGSTS", "cp_async"), ("UBLKCP", "bulk_copy"),
            ("UTMAREDG", "tma_reduce"), ("UTMAPF", "tma_prefetch"), ("LDSM", "ldmatrix"),
            ("UTCHMMA", "tcgen05"), ("UTCQMMA", "tcgen05"), ("UTCOMMA", "tcgen05"),
        ],
    )  # fmt: skip
    def test_an_opcode_has_one_word(self, opcode: str, word: str) -> None:
        assert list(words(opcode)) == [word]

    @pytest.mark.parametrize("opcode", ["FFMA", "LDG", "LDGDEPBAR", "STS", "UTMACMDFLUSH", "UTMACCTL", "MMA", "XHMMA"])
    def test_other_surfaces_have_no_resources(self, opcode: str) -> None:
        assert list(words(opcode)) == []

    def test_every_word_that_may_be_required_can_be_found(self) -> None:
        assert {word for _, word in OPCODES} | {"multicast"} == set(INSTRUCTIONS)


class TestDisassembly:
    KERNELS = (KernelResources(name="a", registers=8), KernelResources(name="b", registers=8))

    def tool(self, tmp_path: Path, script: str) -> Disassembler:
        for name in ("cuobjdump", "nvdisasm"):
            (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
            (tmp_path / name).chmod(0o755)
        return Disassembler(cuobjdump=str(tmp_path / "cuobjdump"), nvdisasm=str(tmp_path / "nvdisasm"))

    def test_none_leaves_instructions_unknown(self, tmp_path: Path) -> None:
        assert with_instructions(self.KERNELS, tmp_path / "k.so", None) == self.KERNELS

    def test_a_kernel_without_any_has_none_not_unknown(self, tmp_path: Path) -> None:
        tool = self.tool(tmp_path, 'echo "Function : a"; echo "        /*0000*/  HMMA.16816 R4 ;"')
        found = with_instructions(self.KERNELS, tmp_path / "k.so", tool)
        assert [kernel.instructions for kernel in found] == [("mma",), ()]

    def test_a_failure_is_reported(self, tmp_path: Path) -> None:
        tool = self.tool(tmp_path, "echo 'not a file' >&2; exit 3")
        with pytest.raises(SurfaceFailure, match="status 3") as caught:
            with_instructions(self.KERNELS, tmp_path / "k.so", tool)
        assert (caught.value.code, caught.value.log) == (Code.COMPILE, "not a file\n")

    def test_it_ends_in_time(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(resources, "DISASSEMBLY_LIMIT_S", 0.2)
        with pytest.raises(SurfaceFailure) as caught:
            with_instructions(self.KERNELS, tmp_path / "k.so", self.tool(tmp_path, "exec sleep 60"))
        assert caught.value.code is Code.TIMEOUT_BUILD
