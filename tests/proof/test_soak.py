"""Many small versions, replicas that come and go, one call in a hundred failing. See `soak`."""

import pytest
from soak import KEEP, Soak, Soaked


def require_sound(found: Soaked) -> None:
    assert found.mislabelled == 0
    assert found.syncs > 3 * found.versions
    assert found.failures > found.versions / 10
    # Kept versions and those since the last collection, back to an anchor: three objects each.
    assert found.objects_largest < 4 * (KEEP + 16 + 8)


def test_three_hundred_versions() -> None:
    require_sound(Soak().go(300))


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_ten_thousand_versions(capsys: pytest.CaptureFixture[str]) -> None:
    found = Soak().go(10_000)
    with capsys.disabled():
        print(found)
    require_sound(found)
    assert found.crashes > 100
    assert found.replaced_trainers > 5
    assert found.resident_end - found.resident_early < 64 << 20
