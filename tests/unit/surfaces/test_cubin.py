"""What is read from the cubins of kernels that were compiled ahead."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_klineage.surfaces import SurfaceFailure, resources
from pytest_klineage.surfaces.resources import Unit, registers


class TestRegisters:
    @pytest.mark.parametrize("name", ["ptxas", "ptxas-blackwell"])
    def test_both_of_tritons_assemblers_are_understood(self, name: str, tmp_path: Path) -> None:
        log = (
            f"{name} info    : Compiling entry function 'tile' for 'sm_120a'\n"
            f"{name} info    : Function properties for tile\n"
            f"    8 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads\n{name} info    : Used 166 registers\n"
        )
        (found,) = registers(Unit(name="tile", file="00.cubin", log=log, shared_bytes=0), tmp_path, None)
        assert (found.name, found.registers, found.spill_bytes) == ("tile", 166, 8)

    def test_a_kernel_that_nothing_is_known_of_is_a_failure(self, tmp_path: Path) -> None:
        with pytest.raises(SurfaceFailure, match="said nothing of tile"):
            registers(Unit(name="tile", file="00.cubin", log="", shared_bytes=0), tmp_path, None)


def test_more_shared_memory_than_a_block_has_is_refused() -> None:
    resources.check_shared("tile", 232_448, "sm90")
    with pytest.raises(SurfaceFailure, match=r"tile needs 232448 bytes.*sm120 has 101376"):
        resources.check_shared("tile", 232_448, "sm120")
