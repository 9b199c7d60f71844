"""The demo's plot can be read: no words cover others, no line runs along a frame."""

from itertools import combinations

import pytest

pytest.importorskip("matplotlib")

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Annotation

from farcast.dashboard.plots import MOST_ROWS, event_labels, figure_of_run
from farcast.fleet.events import EventKind, FleetEvent
from farcast.fleet.records import StepRecord


def happened(kind: EventKind, who: str, version: int) -> FleetEvent:
    return FleetEvent(at=0.0, kind=kind, who=who, step=version, version=version, text="")


EVENTS = [
    happened("killed", "r1", 9),
    happened("joined", "tokyo-gpu-node-17", 10),
    happened("restarted", "r2", 10),
    happened("restarted", "r4", 10),
    happened("away", "store", 11),
    happened("resumed", "trainer", 11),
    happened("joined", "r3", 0),
    happened("joined", "r9", 17),
]


def steps(changed: int) -> list[StepRecord]:
    return [
        StepRecord(
            version=version,
            step=version,
            root="0" * 64,
            incarnation="a",
            consumed=("t",) if version else (),
            changed=changed,
            elements=100,
            bytes_sent=10,
            bytes_full=1000,
        )
        for version in range(18)
    ]


def test_no_two_names_of_events_cover_each_other() -> None:
    figure = figure_of_run(steps(1), EVENTS, title="run")
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    panel = figure.axes[0]
    named = [text for text in panel.texts if isinstance(text, Annotation)]
    assert len(named) == 7  # the two restarts share one
    assert any(text.get_text() == "r2, r4 restarted" for text in named)
    boxes = [text.get_window_extent() for text in named] + [panel.title.get_window_extent()]
    boxes.append(panel._left_title.get_window_extent())  # type: ignore[attr-defined]
    for one, other in combinations(boxes, 2):
        assert not one.overlaps(other) or one.width == 0 or other.width == 0
    assert all(box.x0 > 0 and box.x1 < figure.bbox.x1 for box in boxes)


def test_what_finds_no_room_keeps_its_line_alone() -> None:
    crowd = [happened("killed", f"replica-{number}", number) for number in range(40)]
    labels = event_labels(crowd, newest=40)
    assert {label.row for label in labels} == set(range(MOST_ROWS))
    assert len(labels) < 40
    assert event_labels([happened("killed", "r1", -1)], newest=0)[0].row == 0


def test_a_step_that_changes_all_weights_is_seen_below_the_frame() -> None:
    figure = figure_of_run(steps(100), [], title="run")
    assert figure.axes[2].get_ylim()[1] > 1.05
