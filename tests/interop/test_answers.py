"""What an engine states is judged before it is recorded: what no reader takes only passes on."""

import json
from pathlib import Path
from typing import Any

import pytest
from test_recording import ROOT, RUN, World, answer

from farcast import TrajectorySender
from farcast.interop.answers import NotRecordedError, read_answer, sampling_of
from farcast.interop.journal import Journal
from farcast.interop.outcomes import Outcome
from farcast.interop.recording import Recorder
from farcast.store import open_store


def at(version: Any, root: Any = ROOT) -> dict[str, Any]:
    return {"version": version, "root": root}


def span(start: Any, end: Any, version: Any = 7, root: Any = ROOT) -> dict[str, Any]:
    return {"start": start, "end": end, **at(version, root)}


def said(**changes: Any) -> dict[str, Any]:
    """Three shown tokens and three sampled ones; `logprob`, `spans`, `start` where they differ."""
    made = answer([1, 2, 3], [4, 5, 6])
    choice = made["choices"][0]
    if "logprob" in changes:
        choice["logprobs"]["content"][1]["logprob"] = changes["logprob"]
    if "ids" in changes:
        choice["token_ids"] = changes["ids"]
    made["prompt_token_ids"] = changes.get("prompt", made["prompt_token_ids"])
    made["farcast"]["start"] = changes.get("start", at(7))
    made["farcast"]["spans"] = changes.get("spans", [])
    return made


BAD = {
    "version below 0": said(start=at(-5)),
    "version beyond keys": said(start=at(10**12)),
    "version of 400 digits": said(start=at(10**400)),
    "root is no digest": said(start=at(7, "../../x")),
    "id below 0": said(ids=[4, -1, 6]),
    "id beyond 31 bits": said(ids=[4, 1 << 40, 6]),
    "id of 400 digits": said(ids=[4, 10**400, 6]),
    "prompt id below 0": said(prompt=[1, -2, 3]),
    "prompt id beyond 31 bits": said(prompt=[1, 1 << 31, 3]),
    "log-prob above 0": said(logprob=0.5),
    "log-prob beyond float32": said(logprob=-1e39),
    "log-prob of 400 digits": said(logprob=-(10**400)),
    "no log-prob": said(logprob=None),
    "span gap": said(spans=[span(0, 1), span(2, 3)]),
    "span overlap": said(spans=[span(0, 2), span(1, 3)]),
    "span backwards": said(spans=[span(0, 2), span(2, 1), span(1, 3)]),
    "span empty": said(spans=[span(0, 0), span(0, 3)]),
    "span below 0": said(spans=[span(-1, 3)]),
    "span short": said(spans=[span(0, 2)]),
    "span version": said(spans=[span(0, 3, -1)]),
    "span root": said(spans=[span(0, 3, 7, "AB" * 32)]),
}


@pytest.mark.parametrize("name", BAD)
def test_what_no_reader_takes_is_not_recorded(name: str, tmp_path: Path) -> None:
    """The session goes on without it, and so does the next recorder on the same journal."""
    journal = Journal(tmp_path)
    recorder = Recorder(TrajectorySender(open_store("memory://"), RUN, "rec"), journal=journal)
    with pytest.raises(NotRecordedError):
        recorder.record("s", {}, json.dumps(BAD[name]).encode(), started=0.0)
    assert recorder.refused == 1
    recorder.record("s", {}, json.dumps(said()).encode(), started=0.0)
    journal.close()
    recorder = Recorder(
        TrajectorySender(open_store("memory://"), RUN, "rec"), journal=Journal(tmp_path)
    )
    assert len(recorder.attach(Outcome(session="s", reward=1.0))) == 1


def test_it_passes_to_the_client_as_it_came() -> None:
    async def use(world: World) -> None:
        for bad in BAD.values():
            status, body, headers = await world.chat("s", bad)
            assert (status, body) == (200, bad)
            assert headers["X-Farcast-Recorded"].startswith("no; ")
        assert world.recorder.refused == len(BAD)

    assert World().run(use) == []


def test_rounding_above_zero_and_spans_in_order_are_recorded() -> None:
    good = read_answer(
        json.dumps(said(logprob=5e-4, spans=[span(0, 2), span(2, 9, 8)])).encode()
    ).completion
    assert [(s.start, s.end, s.version) for s in good.spans] == [(0, 2, 7), (2, 3, 8)]


def test_settings_that_are_not_given_are_the_engines_own() -> None:
    assert sampling_of({"temperature": None, "top_k": -1}) == (1.0, 1.0, 0)


@pytest.mark.parametrize(
    "request_",
    [
        {"temperature": 10**400},
        {"top_p": 10**400},
        {"top_k": 10**400},
        {"temperature": float("nan")},
        {"top_p": float("nan")},
        {"top_k": float("inf")},
        {"temperature": [1]},
    ],
)
def test_odd_sampling_settings_are_typed(request_: dict[str, Any]) -> None:
    with pytest.raises(NotRecordedError):
        sampling_of(request_)
