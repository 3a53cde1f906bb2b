"""The scheduler's benchmark: it measures a full house, and finds that the people outside cost nothing."""

import json

from labcore.bench.step_planning import POLICIES, PlanningCost, growth, measure, report, saturated_scheduler, table, timed_step


def test_saturated_scheduler_decodes_in_every_slot_and_keeps_the_others_waiting():
    scheduler = saturated_scheduler(POLICIES["fcfs"], num_running=20, num_waiting=30, room=5)
    before = [request.num_tokens for request in scheduler.running]
    assert timed_step(scheduler) > 0
    assert [request.num_tokens for request in scheduler.running] == [n + 1 for n in before]
    assert len(scheduler.running) == 20 and len(scheduler.waiting) == 30


def test_planning_cost_does_not_grow_with_the_queue():
    costs = measure(waiting=(0, 20_000), rounds=3, steps=5, num_running=100)
    assert [cost.num_waiting for cost in costs] == [0, 20_000] * len(POLICIES)
    assert growth(costs) < 2 and all(0 < cost.microseconds < 50 for cost in costs)


def test_the_report_is_json_and_the_table_has_a_line_for_each_measurement():
    costs = [PlanningCost(name, n, us) for name, us in (("fcfs", 2.0), ("priority", 3.0)) for n in (0, 1000)]
    assert json.loads(json.dumps(report(costs)))["growth"] == 1.0
    assert len(table(costs).splitlines()) == 2 + len(costs)
