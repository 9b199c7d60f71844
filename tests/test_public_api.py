"""The stable names exist, nothing else is promised, and the light parts stay light."""

import subprocess
import sys

import pytest

import farcast

HEAVY = {"torch", "numba", "transformers", "matplotlib", "reasoning_gym"}

STABLE = [
    "CheckpointDirectory",
    "FarcastError",
    "PolicySpan",
    "PublishJob",
    "Publisher",
    "Subscriber",
    "TorchModule",
    "Trajectory",
    "TrajectoryReceiver",
    "TrajectorySender",
    "VersionRef",
    "__version__",
    "open_store",
]


def test_stable_names_are_exactly_these() -> None:
    assert sorted(farcast.__all__) == STABLE
    for name in STABLE:
        assert getattr(farcast, name) is not None


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = farcast.nonsense


@pytest.mark.parametrize(
    "code",
    [
        "import farcast, farcast.config, farcast.errors",
        "import farcast.delta, farcast.lineage, farcast.store, farcast.publish, farcast.replica",
        "import farcast.trajectory, farcast.rollout, farcast.fleet.records",
        "import farcast.cli.main as m; m.main(['--help'])",
    ],
)
def test_light_imports_load_neither_torch_nor_numba(code: str) -> None:
    script = (
        "import sys\n"
        f"try:\n    exec({code!r})\nexcept SystemExit as e:\n    assert not e.code, e.code\n"
        f"heavy = {HEAVY!r} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
