"""The comparison of corrections: its simulated lag is what it says, its page keeps its words."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.models import tiny_folder
from transformers import AutoTokenizer

from farcast.bench.staleness import (
    CORRECTIONS,
    LAGS,
    STALENESS,
    TOKENS,
    Outcome,
    _World,
    cases,
    run_case,
    settings,
)
from farcast.bench.staleness_plot import plot_staleness
from farcast.bench.staleness_report import StalenessReport, tables, write_page
from farcast.errors import ConfigError


def tokenizer() -> object:
    return AutoTokenizer.from_pretrained(tiny_folder(), local_files_only=True)


def test_tokens_are_as_old_as_the_case_says() -> None:
    world = _World(settings(CORRECTIONS["clip"], steps=6, seed=0), tokenizer())
    for _ in range(6):
        world.step("spread", 4)
    for way, oldest, newest in (("lag", 4, 4), ("spread", 4, 0)):
        (group,) = world._sample(1, 8, world._ages(way, 4))
        full = next(m for m in group if len(m.spans) == TOKENS)
        ages = [world.version - span.version for span in full.spans]
        assert (ages[0], ages[-1]) == (oldest, newest)
        assert ages == sorted(ages, reverse=True)


def test_a_mask_leaves_old_tokens_out_and_a_seed_decides_everything() -> None:
    words = tokenizer()
    masked = run_case("mask", "spread", 16, 0, steps=8, tokenizer=words)
    assert masked.used < 1
    twice = [run_case("tis", "lag", 4, 1, steps=3, tokenizer=words) for _ in range(2)]
    assert twice[0].curve == twice[1].curve
    assert twice[0].reward == twice[1].reward


def report() -> StalenessReport:
    outcomes = tuple(
        Outcome(
            correction=name,
            way=way,
            staleness=staleness,
            seed=seed,
            reward=0.1 * seed + 0.2,
            curve=(0.1,),
            used=0.5,
            clipped=0.0,
            seconds=1.0,
        )
        for name, way, staleness in cases()
        for seed in range(3)
    )
    return StalenessReport(steps=1, seeds=3, machine="m", cpu_seconds=60.0, outcomes=outcomes)


def test_the_page_keeps_what_a_person_wrote(tmp_path: Path) -> None:
    page = tmp_path / "staleness.md"
    write_page(report(), page, "staleness.png")
    page.write_text(
        page.read_text().replace("# Staleness", "# Staleness\n\nMine.") + "\nMine too.\n"
    )
    first = page.read_text()
    write_page(report(), page, "staleness.png")
    assert page.read_text() == first
    assert "Mine." in first
    assert "| 0.30 (0.20 to 0.40) |" in first
    page.write_text("no markers")
    with pytest.raises(ConfigError, match="lacks the markers"):
        write_page(report(), page, "staleness.png")


def test_every_case_is_in_a_table_and_in_the_figure(tmp_path: Path) -> None:
    text = tables(report())
    assert len(list(cases())) == len(CORRECTIONS) * len(STALENESS) + 4 * len(LAGS)
    assert all(correction.title in text for correction in CORRECTIONS.values())
    plot_staleness(report(), tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
