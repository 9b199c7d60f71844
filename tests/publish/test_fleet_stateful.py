"""Trainers, a store and replicas, with everything that goes wrong: see the machine."""

import pytest
from hypothesis import settings

from fleet_machine import Fleet


class FleetLong(Fleet):
    """The same, for longer."""


TestFleet = Fleet.TestCase
TestFleet.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)

TestFleetLong = pytest.mark.full(pytest.mark.timeout(3600)(FleetLong.TestCase))
TestFleetLong.settings = settings(max_examples=1000, stateful_step_count=50, deadline=None)
