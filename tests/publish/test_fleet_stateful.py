"""Trainers, a store and replicas, with everything that goes wrong: see the machine."""

import logging

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from fleet_machine import Fleet

STEPS = 50_000

TestFleet = Fleet.TestCase
TestFleet.settings = settings(max_examples=12, stateful_step_count=30, deadline=None)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_fifty_thousand_steps(capsys: pytest.CaptureFixture[str]) -> None:
    long = settings(
        max_examples=200,
        stateful_step_count=60,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    before = Fleet.steps
    logging.disable(logging.WARNING)  # kept for a report, they would fill the memory
    try:
        while Fleet.steps - before < STEPS:
            run_state_machine_as_test(Fleet, settings=long)
    finally:
        logging.disable(logging.NOTSET)
    with capsys.disabled():
        print(f"{Fleet.steps - before} steps, {Fleet.commits} commits by replicas")
