"""Two trainers, a store that fails, rots and is cleaned up: see the machine."""

from hypothesis import settings

from version_machine import Versions

TestVersions = Versions.TestCase
TestVersions.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
