"""What topk accepts: any order and any choice among ties, and nothing else."""

from __future__ import annotations

from typing import TypeAlias

import pytest
import torch

from pytest_klineage.operators import OPERATORS, make_case
from pytest_klineage.records import KernelCase

Tensors: TypeAlias = dict[str, torch.Tensor]


def draw(case: KernelCase, input_distribution: str, seed: int = 1) -> Tensors:
    return OPERATORS[case.operator].make_inputs(case, torch.Generator().manual_seed(seed), input_distribution)


class TestTopK:
    case = make_case("topk", (6, 200, 25), "fp32", "torch")
    operator = OPERATORS["topk"]

    def judged(self, input_distribution: str, **changes: torch.Tensor) -> dict[str, float]:
        x = draw(self.case, input_distribution)
        expected = self.operator.oracle(self.case, x)
        return self.operator.mismatch_count(
            self.case, x, expected, {**self.operator.baseline_output(self.case, x), **changes}
        )

    def answer(self, input_distribution: str) -> dict[str, torch.Tensor]:
        return {
            name: t.clone()
            for name, t in self.operator.baseline_output(self.case, draw(self.case, input_distribution)).items()
        }

    @pytest.mark.parametrize("input_distribution", OPERATORS["topk"].input_distributions)
    def test_any_order_is_right(self, input_distribution: str) -> None:
        order = torch.randperm(self.case.shape["K"], generator=torch.Generator().manual_seed(1))
        shuffled = {name: tensor[:, order] for name, tensor in self.answer(input_distribution).items()}
        assert self.judged(input_distribution, **shuffled) == {"values": 0, "indices": 0}

    def test_any_choice_among_ties_is_right(self) -> None:
        x = draw(self.case, "ties")["x"]
        flipped = x.flip(1)
        indices = x.shape[1] - 1 - flipped.topk(self.case.shape["K"], dim=1).indices
        answer = {"values": x.gather(1, indices), "indices": indices}
        assert not torch.equal(indices.sort().values, self.answer("ties")["indices"].sort().values)
        assert self.judged("ties", **answer) == {"values": 0, "indices": 0}

    def test_zeros_are_equal_but_values_must_be_the_elements_bits(self) -> None:
        answer = self.answer("signed_zeros")
        row, column = (answer["values"] == 0).nonzero()[0].tolist()
        answer["values"][row, column] *= -1
        assert self.judged("signed_zeros", **answer) == {"values": 0, "indices": 1}

    @pytest.mark.parametrize("index", [-1, 200, 2**62, -(2**63)])
    def test_an_index_outside_the_row_is_wrong(self, index: int) -> None:
        answer = self.answer("well_conditioned")
        answer["indices"][2, 3] = index
        assert self.judged("well_conditioned", **answer) == {"values": 0, "indices": 1}

    def test_a_repeated_index_is_wrong(self) -> None:
        answer = self.answer("all_equal")
        answer["indices"][1, 4] = answer["indices"][1, 5]
        assert self.judged("all_equal", **answer) == {"values": 0, "indices": 1}

    def test_the_next_smaller_element_is_wrong(self) -> None:
        x = draw(self.case, "well_conditioned")["x"]
        values, indices = x.topk(self.case.shape["K"] + 1, dim=1)
        keep = [column for column in range(self.case.shape["K"] + 1) if column != self.case.shape["K"] - 1]
        found = self.judged("well_conditioned", values=values[:, keep], indices=indices[:, keep])
        assert found == {"values": x.shape[0], "indices": 0}

    def test_a_missed_tie_above_the_boundary_is_wrong(self) -> None:
        case = make_case("topk", (1, 4, 2), "fp32", "torch")
        x = {"x": torch.tensor([[5.0, 3.0, 3.0, 1.0]])}
        answer = {"values": torch.tensor([[3.0, 3.0]]), "indices": torch.tensor([[1, 2]])}
        found = self.operator.mismatch_count(case, x, self.operator.oracle(case, x), answer)
        assert found == {"values": 1, "indices": 0}

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
    def test_made_up_values_are_wrong_and_raise_nothing(self, value: float) -> None:
        answer = self.answer("well_conditioned")
        answer["values"][:, 0] = value
        found = self.judged("well_conditioned", **answer)
        assert found["values"] >= 6
        assert found["indices"] == 6

    def test_flushed_denormals_are_wrong(self) -> None:
        answer = self.answer("denormals")
        assert self.judged("denormals", values=torch.zeros_like(answer["values"]))["values"] > 0

    def test_undo_keeps_indices_outside_the_row_outside(self) -> None:
        _, undo = self.operator.symmetry_transform(
            self.case, draw(self.case, "well_conditioned"), torch.Generator().manual_seed(1)
        )
        answer = self.answer("well_conditioned")
        answer["indices"].fill_(-3)
        answer["indices"][0] = 2**63 - 1
        indices = undo(answer)["indices"]
        assert not bool(((indices >= 0) & (indices < self.case.shape["S"])).any())

    def test_infinities_never_fill_the_answer(self) -> None:
        """Of plus infinity there are fewer than k in a row; of minus infinity some rows have too many for their k."""
        x = draw(self.case, "infinities")["x"]
        starved = (x > -float("inf")).sum(1) < self.case.shape["K"]
        plus = (x == float("inf")).sum(1)
        assert 1 <= int(starved.sum()) <= max(1, len(x) // 8)
        assert int(plus[~starved].min()) > 0
        assert int(plus.max()) < self.case.shape["K"]
        assert bool((x == -float("inf")).any(1).all())

    def test_some_rows_have_negative_numbers_alone(self) -> None:
        """Two clusters have rows in which only numbers of the lower one can be chosen."""
        below = (draw(self.case, "two_clusters")["x"] < 0).all(1)
        assert 1 <= int(below.sum()) <= max(1, len(below) // 8)

    def test_two_clusters_lie_about_plus_and_minus_ten(self) -> None:
        x = draw(self.case, "two_clusters")["x"]
        assert ((x.abs() - 10).abs() < 0.01).all()
        assert 0.4 < (x > 0).double().mean() < 0.6
        assert (x.unique(dim=1).shape[1]) > self.case.shape["K"]
