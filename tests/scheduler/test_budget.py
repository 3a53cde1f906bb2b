"""The adaptive budget: it finds the tokens that a target affords on any line of costs, and keeps its head in the noise."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labcore.scheduler.budget import AdaptiveBudget

SMALLEST, LARGEST = 16, 2048


class Machine:
    """Steps cost a fixed part and a part for each token; prompts fill every budget."""

    def __init__(self, fixed: float, per_token: float) -> None:
        self.fixed = fixed
        self.per_token = per_token

    def seconds(self, num_tokens: int) -> float:
        return self.fixed + self.per_token * num_tokens

    def work(self, budget: AdaptiveBudget, num_running: int = 0) -> float:
        """One step under the budget; returns what it took."""
        n = budget.tokens(num_running)
        budget.observe(n, self.seconds(n))
        return self.seconds(n)


machines = st.builds(Machine, st.floats(0.0, 0.2), st.floats(1e-6, 1e-2))


@given(machines, st.floats(1e-3, 2.0))
def test_budget_climbs_to_the_target_on_any_line_and_never_passes_it(machine, target):
    budget = AdaptiveBudget(target)
    affordable_at_all = machine.seconds(SMALLEST) <= target
    for _ in range(400):
        before = budget.found
        took = machine.work(budget)
        if affordable_at_all:
            assert took <= target * (1 + 1e-9) and before <= budget.found
    if affordable_at_all and budget.found < LARGEST:
        short_of_it = (target - machine.fixed) / target < 0.02  # so near to the fixed part that it creeps
        assert short_of_it or took > target * budget.found / (budget.found + 1) * (1 - 1e-9)
    if not affordable_at_all:
        assert budget.found == SMALLEST


@given(st.floats(0.0, 0.5), st.floats(1e-5, 1e-3), st.floats(0.2, 5.0))
def test_budget_is_near_the_target_again_within_few_steps_when_costs_change(fixed_share, per_token, change):
    budget = AdaptiveBudget(target=per_token * 400 / (1 - fixed_share))
    machine = Machine(fixed_share * budget.target, per_token)
    for _ in range(60):
        machine.work(budget)
    machine.per_token *= change
    for _ in range(8):
        took = machine.work(budget)
    assert 0.93 * budget.target < took < 1.07 * budget.target


@given(
    st.lists(st.tuples(st.integers(1, 5000), st.floats(0.0, 100.0)), max_size=40),
    st.integers(0, 300),
    st.integers(1, 64),
    st.floats(0.01, 1.0),
)
def test_budget_has_a_token_for_each_running_request_and_the_smallest_for_prompts(steps, num_running, smallest, target):
    budget = AdaptiveBudget(target, smallest, LARGEST)
    for num_tokens, seconds in steps:
        budget.observe(num_tokens, seconds)
        assert smallest <= budget.found <= LARGEST
        assert budget.tokens(num_running) >= num_running + smallest


@given(st.integers(1, 4096), st.floats(0.0, 1e6))
def test_budget_is_at_most_halved_or_doubled_by_one_odd_step(num_tokens, seconds):
    budget = AdaptiveBudget(target=0.1)
    for _ in range(40):
        Machine(0.02, 2e-4).work(budget)
    before = budget.found
    budget.observe(num_tokens, seconds)
    assert before // 2 <= budget.found <= before * 2


def test_budget_is_back_three_steps_after_an_odd_one():
    budget, machine = AdaptiveBudget(target=0.1), Machine(0.02, 2e-4)
    for _ in range(40):
        machine.work(budget)
    level = budget.found
    budget.observe(level, 3.0)
    assert budget.found == level // 2
    for _ in range(3):
        machine.work(budget)
    assert budget.found > 0.98 * level


def test_budget_learns_nothing_from_steps_that_are_neither_full_nor_too_slow():
    budget = AdaptiveBudget(target=0.1)
    budget.observe(10, 0.05)
    assert budget.found == SMALLEST


def test_budget_is_lowered_by_a_step_that_is_not_full_and_too_slow():
    budget = AdaptiveBudget(target=0.1)
    for _ in range(40):
        Machine(0.02, 2e-4).work(budget)
    before = budget.found
    budget.observe(before - 20, 0.2)
    assert budget.found < before


def test_budget_takes_a_step_of_no_time_on_the_clock():
    budget = AdaptiveBudget(target=0.1)
    budget.observe(SMALLEST, 0.0)
    assert budget.found == 2 * SMALLEST


@pytest.mark.parametrize("target", [0, -1.0, float("nan"), float("inf")])
def test_budget_target_that_is_no_time_is_rejected(target):
    with pytest.raises(ValueError, match="target is .*; it must be a number of seconds above 0"):
        AdaptiveBudget(target)


@pytest.mark.parametrize(("smallest", "largest"), [(0, 10), (11, 10), (-1, 10)])
def test_budget_bounds_that_leave_no_room_are_rejected(smallest, largest):
    with pytest.raises(ValueError, match="smallest is"):
        AdaptiveBudget(1.0, smallest, largest)
