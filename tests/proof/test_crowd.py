"""A thousand replicas on one store: few requests, no lists, all there after a poll, no herd."""

from farcast.bench.wan_crowd import simulate


def test_a_thousand_replicas_cost_four_requests_each_and_never_ask_together() -> None:
    found = simulate(replicas=1000, versions=2)
    assert found.behind == 0
    assert found.requests_per_replica_per_version <= 4
    assert found.lists_after_start == 0
    assert found.polls_to_converge == 1
    assert found.first_tries_peak < 0.2


def test_with_one_call_in_a_hundred_failing_all_are_there_within_three_polls() -> None:
    found = simulate(replicas=200, versions=3, failing=0.01)
    assert found.behind == 0
    assert found.polls_to_converge <= 3
