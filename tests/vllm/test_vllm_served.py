"""`farcast replica --engine vllm` before the real server, with versions going live under load."""

import pytest
from vllm_world import environment_python

from farcast.bench.serving_spans import check_spans
from farcast.train.models import default_cache, prepare_model
from servers import free_ports

pytestmark = pytest.mark.vllm


def test_answers_are_what_the_versions_they_name_write() -> None:
    python = environment_python()
    assert python is not None
    model = prepare_model("smollm2", default_cache())
    report = check_spans(python, model, free_ports(2), versions=4)
    assert report.span_mismatches == 0, report
    assert report.requests_lost == 0, report
    assert report.versions_checked >= 4, report
    assert report.control_mismatches > 0.8 * report.answers, report
    assert all(kind.found for kind in report.planted if kind.planted > 4), report
