"""A study of a few steps, end to end: rows, plots, page, and what a folder keeps."""

import csv
import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("matplotlib")

import torch
from msgspec.structs import replace
from tests.models import tiny_folder
from typer.testing import CliRunner

from farcast.cli.main import app
from farcast.config import RunConfig
from farcast.errors import ConfigError
from farcast.fleet.presets import run_config
from farcast.study import corpus, plots, settings, tables
from farcast.study.corpus import standard_library
from farcast.study.figures import FIGURES, known_figures
from farcast.study.folder import MARK
from farcast.study.replay import replay
from farcast.study.report import HEADINGS, write_report
from farcast.study.rows import FIELDS
from farcast.study.settings import STAGES, StageName, StudySettings
from farcast.study.stages import make_course, make_policy
from farcast.study.suite import Study

ROW = {
    "optimizer",
    "lr",
    "format",
    "stage",
    "step",
    "changed_fraction",
    "predicted_fraction",
    "bytes",
    "bytes_full",
}
SHORT = replace(
    settings.QUICK,
    steps=8,
    stage_steps=3,
    warmup=2,
    groups=1,
    members=4,
    law_steps=3,
    layers=1,
    length=32,
    rates=(1e-6, 1e-4),
    format_rates=(1e-5,),
    full_every=2,
    answers=2,
    cost_steps=4,
)


def tiny_run(out: Path) -> RunConfig:
    run = run_config("tiny", run_id="study", store="memory://", out=out)
    return replace(run, sampling=replace(run.sampling, max_new_tokens=2))


def study(out: Path, chosen: StudySettings = SHORT) -> Study:
    return Study(out, tiny_folder(), tiny_run(out), chosen)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every figure and its page."""
    out = tmp_path_factory.mktemp("study")
    made = study(out)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "standard_library", lambda: standard_library(1 << 14))
        made.figures(list(FIGURES))
    write_report(out, made.held())
    return out


def test_every_figure_has_rows_a_plot_and_its_place_on_the_page(whole: Path) -> None:
    page = (whole / "report.md").read_text()
    records = study(whole).held()
    assert [record.figure for record in records] == list(FIGURES)
    for record in records:
        assert record.rows
        assert (whole / f"{record.figure}.png").stat().st_size > 10_000
        assert HEADINGS[record.figure].title in page
        with (whole / f"{record.figure}.csv").open() as file:
            table = list(csv.DictReader(file))
        assert len(table) == len(record.rows)
        assert set(table[0]) == set(FIELDS) >= ROW


def test_rows_hold_what_can_be(whole: Path) -> None:
    for row in (row for record in study(whole).held() for row in record.rows):
        assert 0 <= row.changed_fraction <= 1
        assert row.predicted_fraction is None or 0 <= row.predicted_fraction <= 1
        assert row.bytes is None or row.bytes_full is None or 0 < row.bytes < 2 * row.bytes_full


def test_every_stage_trains_and_the_law_is_near_for_the_whole_model(whole: Path) -> None:
    (record,) = (record for record in study(whole).held() if record.figure == "stages")
    assert {row.stage for row in record.rows} == set(STAGES)
    closed = [row for row in record.rows if row.loop == "closed"]
    assert len(closed) >= len(STAGES)
    assert any(row.changed_fraction for row in closed)
    for row in closed:
        assert row.actual_fraction == pytest.approx(row.changed_fraction, rel=0.1, abs=1e-4)


def test_plain_rounding_is_no_distance_from_itself(whole: Path) -> None:
    (record,) = (record for record in study(whole).held() if record.figure == "sticky")
    closed = {(row.format, row.step): row for row in record.rows if row.loop == "closed"}
    plain, held = closed["bf16", 4], closed["bf16-round1", 4]
    assert (plain.apart, plain.kl) == (0.0, 0.0)
    assert held.apart is not None
    assert held.kl is not None
    assert held.apart > 0
    assert held.kl > 0
    assert held.changed_fraction < plain.changed_fraction


def test_what_is_there_is_kept_and_other_settings_are_made_anew(whole: Path) -> None:
    record, made = study(whole).figure("where")
    assert not made
    other = study(whole, replace(SHORT, law_steps=2))
    assert other.held() == []
    assert study(whole).held()[0].settings == SHORT
    assert record.settings == SHORT


def test_a_damaged_figure_is_made_again(whole: Path, tmp_path: Path) -> None:
    (tmp_path / MARK).touch()
    (tmp_path / "streams").symlink_to(whole / "streams")
    (tmp_path / "where.json").write_bytes(b"{}")
    record, made = study(tmp_path).figure("where")
    assert made
    assert record == study(whole).figure("where")[0]


@pytest.mark.parametrize("stage", ["grpo", "sft"])
def test_a_replay_at_the_runs_own_rate_is_that_run(whole: Path, stage: StageName) -> None:
    """Steps without a gradient, as GRPO has where all answers earn the same, included."""
    stream = study(whole)._stream(stage)
    run = tiny_run(whole)
    spec = STAGES[stage]
    train = replace(run.train, learning_rate=spec.lr, warmup_steps=SHORT.warmup)
    run = replace(run, train=train)
    policy = make_policy(tiny_folder(), run, from_scratch=False, seed=SHORT.seed)
    course = make_course(stage, policy, tiny_folder(), run, SHORT)
    moments = replay(stream, "adamw", train, steps=SHORT.steps)
    for step, moment in enumerate(moments, start=1):
        hop = moment.masters(spec.lr, "adamw", stream.hidden)
        course.step(step, policy)
        masters = policy.masters()
        for name in stream.hidden:
            torch.testing.assert_close(
                hop.target[name], masters[name], rtol=1e-6, atol=2e-3 * spec.lr
            )


def test_names_of_figures_are_checked() -> None:
    assert known_figures(None) == tuple(FIGURES)
    assert known_figures(["lag", "law"]) == ("law", "lag")
    with pytest.raises(ConfigError, match="no figure 'laws'; name law, where"):
        known_figures(["laws"])
    assert set(FIGURES) == set(HEADINGS) == set(tables._TABLES) == set(plots._PLOTS)


def test_the_command_writes_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "QUICK", replace(SHORT, steps=3))
    told = tmp_path / "study.json"
    line = ["study", "--quick", "--figure", "law", "--model", str(tiny_folder())]
    done = CliRunner().invoke(app, [*line, "--out", str(tmp_path / "out"), "--json", str(told)])
    assert done.exit_code == 0, done.output
    report = json.loads(told.read_text())
    assert {row["optimizer"] for row in report["rows"]} == {"adamw", "muon"}
    assert all(row.keys() >= ROW for row in report["rows"])
    assert (tmp_path / "out" / "law.png").is_file()
    assert "predicted" in done.output
