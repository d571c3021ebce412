"""The tree is the released one: rewards, selection, widening, what steps are shown; the same seed, the same tree."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st

from pytest_klineage.errors import UsageError
from pytest_klineage.lab.optimizers.adaexplore.tree import (
    Action,
    AdaExploreSettings,
    Grade,
    MemoryMode,
    Node,
    NodeOrigin,
    SearchTree,
    best_of_components,
)
from pytest_klineage.records import KernelSource, SourceFile, Surface

WRONG, UNBUILT = Grade(True, False), Grade()


def right(speedup: float) -> Grade:
    return Grade(True, True, speedup)


def kernel(number: int) -> KernelSource:
    return KernelSource(surface=Surface.CPP, files=(SourceFile("k.cpp", f"// {number}"),), entry="run")


def tree(seed: int = 0, **settings: object) -> SearchTree:
    return SearchTree(AdaExploreSettings(**settings), random.Random(seed))  # type: ignore[arg-type]


def grow(search: SearchTree, at: Node, origin: NodeOrigin, grade: Grade) -> Node:
    return search.record(Action(at, origin, ()), kernel(len(search.nodes)), grade)


class TestReward:
    @pytest.mark.parametrize(
        ("speedup", "reward"),
        [
            (0.05, 0.4), (0.1, 0.4), (0.5, 0.448484848), (0.88, 0.494545455), (1, 0.509090909), (2, 0.630303030),
            (1.5853658536585367, 0.5800443458980045), (10, 1.6), (912, 1.6),
        ],
    )  # fmt: skip
    def test_of_right_kernels(self, speedup: float, reward: float) -> None:
        assert right(speedup).reward == pytest.approx(reward, abs=1e-9)

    def test_of_others(self) -> None:
        assert (UNBUILT.reward, WRONG.reward, Grade(False, True, 3.0).reward) == (0.0, 0.05, 0.0)

    def test_scores_are_compared_from_left_to_right(self) -> None:
        assert UNBUILT.score < WRONG.score < right(0.01).score < right(0.02).score
        assert Grade(True, False, 9.0).score == (1, 0, 0.0)


class TestSelection:
    def vector(self) -> tuple[SearchTree, list[Node]]:
        """The tree of a run of the release, by its visits and rewards."""
        search = tree()
        children = [grow(search, search.root, NodeOrigin.LARGE, UNBUILT) for _ in range(3)]
        for child, visits, total in zip(children, (4, 6, 2), (1.4973, 2.8870, 0.5727), strict=True):
            child.visits, child.total_reward = visits, total
        search.root.visits = 12
        return search, children

    def test_upper_bounds_and_the_price_of_another_child(self) -> None:
        search, children = self.vector()
        assert [search.child_score(child) for child in children] == pytest.approx([0.6108, 0.6742, 0.6207], abs=1e-4)
        assert search.expand_score(search.root) == pytest.approx(0.6388, abs=1e-4)
        assert search.select() is children[1]

    def test_a_child_that_was_never_visited_comes_first(self) -> None:
        search, children = self.vector()
        children[2].visits = 0
        assert search.select() is children[2]

    def test_it_stops_where_another_child_promises_more(self) -> None:
        search, children = self.vector()
        del search.root.children[1:]
        children[0].visits, search.root.visits = 400, 401
        assert search.select() is search.root

    def test_without_weight_no_inner_node_is_widened(self) -> None:
        search = tree(expand_ratio=0.0)
        child = grow(search, search.root, NodeOrigin.LARGE, right(1))
        child.visits = 400
        assert search.select() is child

    def test_ties_go_to_the_first(self) -> None:
        search = tree(exploration=0.0)
        first = grow(search, search.root, NodeOrigin.LARGE, right(1))
        grow(search, search.root, NodeOrigin.LARGE, right(1))
        assert search.select() is first

    def test_the_value_is_the_mean_below(self) -> None:
        search = tree()
        node = grow(search, search.root, NodeOrigin.LARGE, right(0.1))
        grow(search, node, NodeOrigin.SMALL, right(10))
        assert search.value(node) == pytest.approx((0.4 + 1.6) / 2)


class TestActions:
    def test_the_first_step_is_large_and_sees_nothing(self) -> None:
        search = tree(p_large=0.0)
        assert search.next_action() == Action(search.root, NodeOrigin.LARGE, ())

    def test_small_steps_are_used_up(self) -> None:
        search = tree(p_large=0.0)
        node = grow(search, search.root, NodeOrigin.LARGE, right(1))
        chosen = [search.choose(node)]
        for _ in range(2):
            grow(search, node, NodeOrigin.SMALL, right(0.5))
            chosen.append(search.choose(node))
        assert chosen == [NodeOrigin.SMALL, NodeOrigin.SMALL, NodeOrigin.LARGE]

    def test_large_steps_have_their_probability(self) -> None:
        search = tree(p_large=0.2)
        node = grow(search, search.root, NodeOrigin.LARGE, right(1))
        large = sum(search.choose(node) is NodeOrigin.LARGE for _ in range(4000))
        assert 700 < large < 900

    def test_a_reply_without_a_kernel_is_followed_by_a_large_step(self) -> None:
        search = tree(p_large=0.0)
        search.record(search.next_action(), None, UNBUILT)
        assert search.next_action().origin is NodeOrigin.LARGE

    def test_a_chain_begins_at_the_large_step_and_is_bounded(self) -> None:
        search = tree(memory_rounds=3)
        above = grow(search, search.root, NodeOrigin.LARGE, right(1))
        head = grow(search, above, NodeOrigin.LARGE, right(1))
        first = grow(search, head, NodeOrigin.SMALL, right(1))
        assert search.chain(first) == (head, first)
        second = grow(search, first, NodeOrigin.SMALL, WRONG)
        third = grow(search, second, NodeOrigin.SMALL, WRONG)
        assert search.chain(third) == (first, second, third)

    def test_kernels_that_never_were_drop_out_of_a_chain(self) -> None:
        search = tree()
        head = grow(search, search.root, NodeOrigin.LARGE, right(1))
        lost = search.record(Action(head, NodeOrigin.SMALL, (head,)), None, UNBUILT)
        assert search.chain(lost) == (head,)


class TestPool:
    def test_it_holds_the_best_kernel_of_each_path_component(self) -> None:
        search = tree()
        first = grow(search, search.root, NodeOrigin.LARGE, right(1))
        better = grow(search, first, NodeOrigin.SMALL, right(2))
        grow(search, first, NodeOrigin.SMALL, WRONG)
        second = grow(search, better, NodeOrigin.LARGE, WRONG)
        deep = grow(search, second, NodeOrigin.SMALL, right(5))
        beside = grow(search, search.root, NodeOrigin.LARGE, right(9))
        assert search.pool(deep) == (better, deep)
        assert search.pool(second) == (better, deep)
        assert search.pool(beside) == (beside,)
        assert search.pool(search.root) == ()

    def test_the_earliest_of_equals(self) -> None:
        search = tree()
        head = grow(search, search.root, NodeOrigin.LARGE, right(1))
        grow(search, head, NodeOrigin.SMALL, right(1))
        assert best_of_components([head]) == [head]

    def test_more_than_fit_are_sampled(self) -> None:
        search = tree(pool_size=2)
        node, heads = search.root, []
        for _ in range(6):
            node = grow(search, node, NodeOrigin.LARGE, right(1))
            heads.append(node)
        pools = {tuple(node.number for node in search.pool(heads[-1])) for _ in range(60)}
        assert all(len(set(pool)) == 2 for pool in pools)
        assert {number for pool in pools for number in pool} == {node.number for node in heads}

    def test_other_branches_are_not_shown(self) -> None:
        search = tree()
        own = grow(search, search.root, NodeOrigin.LARGE, right(1))
        grow(search, search.root, NodeOrigin.LARGE, right(2))
        assert search.pool(own) == (own,)


STEPS = st.lists(
    st.one_of(st.none(), st.just(WRONG), st.floats(0.01, 20).map(right)), min_size=1, max_size=60
)  # fmt: skip


@effort(deadline=None)
@given(steps=STEPS, seed=st.integers(0, 2**32))
def test_whatever_happens_the_tree_keeps_its_books(steps: list[Grade | None], seed: int) -> None:
    def grown() -> tuple[SearchTree, list[Action]]:
        search, actions = tree(seed), []
        for number, grade in enumerate(steps):
            actions.append(search.next_action())
            source = None if grade is None else kernel(number)
            search.record(actions[-1], source, grade or UNBUILT)
        return search, actions

    search, actions = grown()
    assert search.root.visits == len(steps)
    assert search.root.total_reward == pytest.approx(sum((grade or UNBUILT).reward for grade in steps))
    for node in search.nodes[1:]:
        assert node.visits == 1 + sum(child.visits for child in node.children)
        small = [child for child in node.children if child.origin is NodeOrigin.SMALL]
        assert len(small) <= search.settings.small_step_limit
    for action in actions:
        assert len(action.shown) <= 5
        assert all(node.kernel is not None for node in action.shown)
        if action.origin is NodeOrigin.LARGE:
            assert all(node.grade.correct for node in action.shown)
        elif action.at.kernel is not None:
            assert action.shown[-1] is action.at
    best = max(search.nodes, key=lambda node: node.grade.score)
    assert search.best is best
    again, repeated = grown()
    assert [node.shown for node in again.nodes] == [node.shown for node in search.nodes]
    assert [action.at.number for action in repeated] == [action.at.number for action in actions]


@pytest.mark.parametrize(
    "wrong",
    [
        {"total_steps": 0}, {"p_large": -0.1}, {"small_step_limit": -1}, {"memory": MemoryMode.SHARED},
        {"max_output_tokens": 0},
    ],
)  # fmt: skip
def test_settings_that_cannot_be_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        AdaExploreSettings(**wrong)  # type: ignore[arg-type]


def test_the_released_configuration_is_the_default() -> None:
    settings = AdaExploreSettings()
    assert (settings.exploration, settings.p_large) == (0.3, 0.2)
    assert (settings.total_steps, settings.small_step_limit, settings.memory_rounds, settings.pool_size) == (
        50,
        2,
        5,
        5,
    )
    assert (settings.memory, settings.threshold, settings.max_output_tokens) == (MemoryMode.RESET, 3.0, 16384)
    assert AdaExploreSettings(memory=MemoryMode.ONLINE).threshold == 1.0
    assert AdaExploreSettings(memory=MemoryMode.ONLINE, rule_threshold=2).threshold == 2
