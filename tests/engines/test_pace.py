"""When a follower asks next: never in step with others, longer after each failure, bounded."""

import random

from farcast.engines.pace import LONGEST_WAIT_SECONDS, Pace


def test_what_started_together_drifts_apart_at_once() -> None:
    first = [Pace(2.0, random.Random(seed)).after_quiet() for seed in range(1000)]
    assert all(0 <= wait < 2 for wait in first)
    in_tenths = [sum(i / 5 <= wait < (i + 1) / 5 for wait in first) for i in range(10)]
    assert max(in_tenths) < 150


def test_the_interval_is_kept_give_or_take_a_tenth() -> None:
    pace = Pace(2.0, random.Random(1))
    pace.after_quiet()
    waits = [pace.after_quiet() for _ in range(200)]
    assert all(1.8 <= wait <= 2.2 for wait in waits)
    assert abs(sum(waits) / 200 - 2.0) < 0.05


def test_failures_double_the_wait_up_to_a_bound_and_success_forgets_them() -> None:
    pace = Pace(1.0, random.Random(1))
    waits = [pace.after_failure() for _ in range(20)]
    assert all(
        0.75 * 2 ** (i + 1) <= wait <= 1.25 * 2 ** (i + 1) for i, wait in enumerate(waits[:4])
    )
    assert all(wait <= 1.25 * LONGEST_WAIT_SECONDS for wait in waits)
    assert len({round(wait, 6) for wait in waits}) == 20
    pace.moved()
    assert pace.after_failure() <= 2.5
    slow = Pace(100.0, random.Random(1))
    assert slow.after_failure() >= 75, "a failure never makes it ask more often"
