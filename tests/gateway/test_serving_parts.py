"""The pure parts of the HTTP side: what is asked for, what is changed on the way, who wrote it."""

import json
import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from yarl import URL

from farcast.engines.admission import Constraint
from farcast.engines.http_engine import label_of
from farcast.engines.plain_http import PlainEngine
from farcast.engines.sglang_engine import SglangEngine
from farcast.engines.vllm_engine import VllmEngine
from farcast.errors import ConfigError, IntegrityError
from farcast.fleet.leases import SILENT_SECONDS
from farcast.fleet.records import ReplicaRecord
from farcast.fleet.registry import Sighting
from farcast.gateway import provenance
from farcast.gateway.bodies import join, salted, split, with_field
from farcast.gateway.constraint import constraint_of
from farcast.gateway.fleet_view import FleetView
from farcast.gateway.routes import ROUTES
from farcast.gateway.streams import EventRelay
from farcast.gateway.tokens import Token, read_token
from farcast.types import VersionRef

REFS = [VersionRef("run1", version, f"{version:064x}") for version in range(4)]
KNOWN = {label_of(ref): ref for ref in REFS}.get
SECRET = "SENTINELSECRET-0123456789"


# --- what is asked for -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "header", "expected"),
    [
        (None, None, Constraint()),
        ("null", None, Constraint()),
        ("{}", None, Constraint()),
        ('{"min_version": 3}', None, Constraint(min_version=3)),
        ('{"exact_version": 0}', None, Constraint(exact_version=0)),
        ('{"min_version": 3, "exact_version": null}', None, Constraint(min_version=3)),
        (None, "min=12", Constraint(min_version=12)),
        (None, " exact = 12 ", Constraint(exact_version=12)),
        ('{"min_version": 3}', "min=3", Constraint(min_version=3)),
        ("null", "exact=1", Constraint(exact_version=1)),
    ],
)
def test_a_constraint_is_read(body: str | None, header: str | None, expected: Constraint) -> None:
    field = None if body is None else msgspec.Raw(body.encode())
    assert constraint_of(field, header) == expected


@pytest.mark.parametrize(
    ("body", "header"),
    [
        ('{"min_version": 3, "exact_version": 3}', None),
        ('{"min_version": -1}', None),
        ('{"min_version": 1.5}', None),
        ('{"min_version": "3"}', None),
        ('{"min_version": true}', None),
        ('{"minimum": 3}', None),
        ('{"min_version": 1000000000000}', None),
        ("[]", None),
        ("7", None),
        (None, "12"),
        (None, "min=-1"),
        (None, "min=1,exact=1"),
        (None, "min=1234567890123"),
        (None, "max=3"),
        ('{"min_version": 3}', "min=4"),
        ('{"min_version": 3}', "exact=3"),
    ],
)
def test_what_is_not_clear_is_refused(body: str | None, header: str | None) -> None:
    field = None if body is None else msgspec.Raw(body.encode())
    with pytest.raises(ConfigError, match="; "):
        constraint_of(field, header)


# --- bodies ----------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=12), JSON, max_size=6), st.booleans())
def test_a_body_passes_unchanged_but_for_its_own_field(
    body: dict[str, object], ascii: bool
) -> None:
    fields = split(json.dumps({**body, "weight_version": 1}, ensure_ascii=ascii).encode())
    assert bytes(fields.pop("weight_version")) == b"1"
    body.pop("weight_version", None)
    assert json.loads(join(fields)) == body


@pytest.mark.parametrize(
    "body",
    [
        b'{"cache_salt": "mine", "cache_salt": "yours"}',
        b'{"cache\\u005fsalt": "yours"}',
        b'{"cache_salt" : "yours"}',
    ],
)
def test_a_client_cannot_take_the_salt_away(body: bytes) -> None:
    """However it is written: given twice, behind escapes, with odd spaces."""
    fields = split(body)
    salted(fields, "cache_salt", "v1")
    assert json.loads(join(fields)) == {"cache_salt": "v1:yours"}


def test_salts_of_lists_and_bad_ones() -> None:
    fields = split(b'{"extra_key": ["a", "b"]}')
    salted(fields, "extra_key", "v1")
    assert json.loads(join(fields)) == {"extra_key": ["v1:a", "v1:b"]}
    for bad in (b'{"cache_salt": 7}', b'{"cache_salt": "%b"}' % (b"x" * 2000)):
        with pytest.raises(ConfigError):
            salted(split(bad), "cache_salt", "v1")


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'"x"', b"{]", b"\xff", b"[" * 100_000])
def test_what_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(ConfigError, match="JSON object"):
        split(body)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b'{"a": 1}', b'{"a": 1,"x":2}'),
        (b'{"a": 1} \n', b'{"a": 1,"x":2}'),
        (b"{}", b'{"x":2}'),
        (b"{ }", b'{ "x":2}'),
        (b"[1]", b"[1]"),
        (b"", b""),
        (b'"}"', b'"}"'),
    ],
)
def test_a_field_is_added_without_parsing(answer: bytes, expected: bytes) -> None:
    assert with_field(answer, "x", b"2") == expected


# --- who wrote it ----------------------------------------------------------------------------


def answer_of(*spans: tuple[str, int, int]) -> bytes:
    versions = [{"version": v, "start": s, "end": e} for v, s, e in spans]
    return json.dumps({"choices": [{"index": 0, "weight_versions": versions}]}).encode()


def test_spans_of_a_commit_inside() -> None:
    data = answer_of((label_of(REFS[1]), 0, 3), (label_of(REFS[2]), 3, 8))
    said = provenance.crossed(REFS[1], REFS[2], provenance.reported_spans(data), KNOWN)
    assert said.spans is not None
    assert [(s.start, s.end, s.version) for s in said.spans] == [(0, 3, 1), (3, 8, 2)]
    headers = provenance.headers(said)
    assert headers["X-Farcast-Spans"] == "0:0-3=1,0:3-8=2"
    assert headers["X-Farcast-Version-Start"] == "1"
    assert headers["X-Farcast-Root-End"] == REFS[2].root


def test_a_commit_after_the_last_token_is_not_inside() -> None:
    reported = provenance.reported_spans(answer_of((label_of(REFS[1]), 0, 8)))
    said = provenance.crossed(REFS[1], REFS[2], reported, KNOWN)
    assert said == provenance.single(REFS[1])


def test_a_commit_before_the_first_token_shows_in_the_start() -> None:
    """It may have met prefixes of the version under which it was let in."""
    reported = provenance.reported_spans(answer_of((label_of(REFS[2]), 0, 8)))
    said = provenance.crossed(REFS[1], REFS[2], reported, KNOWN)
    assert (said.start.version, said.end.version) == (1, 2)
    assert said.spans is not None
    assert [(s.start, s.end, s.version) for s in said.spans] == [(0, 8, 2)]


def test_an_engine_that_can_not_tell_is_not_guessed_for() -> None:
    said = provenance.crossed(REFS[1], REFS[2], [], KNOWN)
    assert said.spans is None
    assert provenance.headers(said)["X-Farcast-Spans"] == "unknown"


@pytest.mark.parametrize("label", ["", "run1@1:beef", "other@1:" + "0" * 64])
def test_weights_that_nobody_verified_are_noticed(label: str) -> None:
    reported = provenance.reported_spans(answer_of((label, 0, 8)))
    with pytest.raises(IntegrityError):
        provenance.crossed(REFS[1], REFS[2], reported, KNOWN)
    with pytest.raises(IntegrityError):
        provenance.check(reported, REFS[1], KNOWN)


def test_another_version_than_the_gate_thinks_is_noticed() -> None:
    reported = provenance.reported_spans(answer_of((label_of(REFS[2]), 0, 8)))
    with pytest.raises(IntegrityError):
        provenance.check(reported, REFS[1], KNOWN)


@given(st.lists(st.integers(1, 40), max_size=30), st.booleans())
def test_a_stream_passes_event_by_event_however_it_is_cut(cuts: list[int], windows: bool) -> None:
    end = b"\r\n\r\n" if windows else b"\n\n"
    events = [b'data: {"choices":[{"index":0,"text":"%d"}]}' % n for n in range(4)]
    last = b"data: " + answer_of((label_of(REFS[1]), 0, 4))
    stream = end.join([*events, last, b"data: [DONE]"]) + end
    relay, out, place = EventRelay(), b"", 0
    for cut in [*cuts, len(stream)]:
        out += relay.push(stream[place : place + cut])
        assert out == b"" or out.endswith(end)
        place += cut
    assert b"[DONE]" not in out
    out += relay.finish(provenance.single(REFS[1]))
    comment = [line for line in out.splitlines() if line.startswith(b": farcast ")]
    assert json.loads(comment[0][10:])["end"]["version"] == 1
    assert out.replace(comment[0] + b"\n\n", b"") == stream
    assert out.rstrip().endswith(b"data: [DONE]")
    assert [span.end for _, span in relay.reported] == [4]


# --- tokens, routes --------------------------------------------------------------------------


def test_a_token_is_compared_whole() -> None:
    token = Token(SECRET)
    assert token.allows(f"Bearer {SECRET}")
    assert token.allows(f"bearer {SECRET}")
    for wrong in (
        None,
        "",
        SECRET,
        f"Basic {SECRET}",
        f"Bearer {SECRET}x",
        f"Bearer {SECRET[:-1]}",
    ):
        assert not token.allows(wrong)
    assert SECRET not in repr(token)


def test_a_token_comes_from_one_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "token"
    path.write_text(SECRET + "\n")
    monkeypatch.setenv("TOKEN_OF_TEST", SECRET)
    for token in (read_token(path, None), read_token(None, "TOKEN_OF_TEST")):
        assert token.allows(f"Bearer {SECRET}")
    monkeypatch.setenv("TOKEN_OF_TEST", "short")
    for file, variable in (
        (None, None),
        (path, "TOKEN_OF_TEST"),
        (tmp_path / "none", None),
        (None, "TOKEN_OF_TEST"),
        (None, "NOT_SET_" + str(os.getpid())),
    ):
        with pytest.raises(ConfigError) as caught:
            read_token(file, variable)
        assert SECRET not in str(caught.value)


def test_no_route_that_changes_weights_or_runs_code_is_offered() -> None:
    words = ("weight", "pause", "resume", "continue", "rpc", "sleep", "wake", "abort", "lora")
    words += ("cache", "profile", "shutdown", "server_info", "update", "load", "release")
    for table in ROUTES.values():
        for method, path in table:
            assert not any(word in path for word in words), (method, path)
    for engine in (VllmEngine, SglangEngine, PlainEngine):
        for _, path in ROUTES[engine.name]:  # type: ignore[index]
            assert not path.startswith(engine.guarded_routes)


# --- choosing a replica ----------------------------------------------------------------------


class Fleet:
    """A view with a clock that stands still until told."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.view = FleetView(clock=lambda: self.now, wall=lambda: self.now)

    def update(self, beat: float, **versions: int) -> None:
        self.view.update({name: self.sighting(name, v, beat) for name, v in versions.items()})

    def sighting(self, name: str, version: int, beat: float, **fields: str) -> Sighting:
        record = ReplicaRecord(
            replica_id=name,
            state=fields.get("state", "serving"),  # type: ignore[arg-type]
            version=version,
            url=fields.get("url", f"http://{name}"),
            updated=beat,
        )
        return Sighting(record, self.now)

    def names(self, constraint: Constraint, preferred: str | None = None) -> list[str]:
        return [choice.member.name for choice in self.view.ordered(constraint, preferred)]


def test_those_that_suit_come_first_and_take_turns() -> None:
    fleet = Fleet()
    fleet.update(1, a=3, b=4, c=5)
    assert set(fleet.names(Constraint(min_version=4))[:2]) == {"b", "c"}
    assert fleet.names(Constraint(exact_version=3))[0] == "a"
    assert {fleet.names(Constraint())[0] for _ in range(6)} == {"a", "b", "c"}


def test_a_session_stays_unless_its_replica_does_not_suit() -> None:
    fleet = Fleet()
    fleet.update(1, a=3, b=4)
    fleet.view.usable()[0].load = 50
    assert all(fleet.names(Constraint(), "a")[0] == "a" for _ in range(4))
    assert fleet.names(Constraint(min_version=4), "a")[0] == "b"


def test_the_idlest_is_asked() -> None:
    fleet = Fleet()
    fleet.update(1, a=3, b=3)
    by_name = {member.name: member for member in fleet.view.usable()}
    by_name["a"].load = 2
    assert all(fleet.names(Constraint())[0] == "b" for _ in range(4))


def test_silent_stopped_and_odd_replicas_are_not_asked() -> None:
    fleet = Fleet()
    fleet.update(1, a=3, b=3)
    fleet.now += 2
    fleet.update(2, a=3)  # b's record is gone
    assert fleet.names(Constraint()) == ["a"]
    for second in range(2, 15, 2):
        fleet.now += 2
        fleet.update(2, a=3)  # the same record as before
        assert fleet.names(Constraint()) == (["a"] if second < SILENT_SECONDS else [])
    fleet.update(3, a=3)  # it lives
    assert fleet.names(Constraint()) == ["a"]
    odd_ones = [{"state": "draining"}, {"state": "failed"}]
    odd_ones += [
        {"url": url} for url in ("", "file:///etc", "http://", "http://[x", "http://h:99999")
    ]
    for odd in odd_ones:
        fleet.view.update({"a": fleet.sighting("a", 3, fleet.now, **odd)})
        fleet.now += 1
        assert fleet.names(Constraint()) == [], odd


@pytest.mark.parametrize(
    "url",
    [
        "http://user:word@10.0.0.1:80",
        "http://@10.0.0.1",
        "http://a..b",
        f"http://{'a' * 64}",
        f"http://{'a.' * 600}b",
        "http://h:80\\@x",
        "http://h/?a=",
        "http://h/#a",
        "http://h/%2e%2e",
        "http://h/a b",
        "http://h\r\nX: y",
        "http://h:\u0669",
        "http://h:0",
        "http://\u2603",
        "http://[::1",
    ],
)
def test_no_request_goes_to_an_address_that_is_not_plain(url: str) -> None:
    """With some of them the client raises, each time and at once: the idlest of all replicas."""
    fleet = Fleet()
    fleet.view.update({"a": fleet.sighting("a", 3, 1, url=url)})
    assert fleet.names(Constraint()) == []


@pytest.mark.parametrize(
    "url",
    [
        "http://my_replica.local:8000",
        "https://h.example./r/1",
        "http://[::1]:80",
        "HTTP://10.0.0.1",
    ],
)
def test_plain_addresses_are_asked(url: str) -> None:
    fleet = Fleet()
    fleet.view.update({"a": fleet.sighting("a", 3, 1, url=url)})
    assert fleet.names(Constraint()) == ["a"]
    assert URL(url).host


def test_an_address_with_a_slash_at_its_end_is_the_same_replica_at_each_look() -> None:
    fleet = Fleet()
    fleet.view.update({"a": fleet.sighting("a", 3, 1, url="http://a/")})
    (member,) = fleet.view.usable()
    member.load = 7
    fleet.view.update({"a": fleet.sighting("a", 3, 2, url="http://a/")})
    assert fleet.view.usable() == [member]


def test_replicas_are_asked_as_before_while_the_store_is_away_and_when_it_is_back() -> None:
    """Nobody could rewrite a record meanwhile, and nobody has yet at the first look after."""
    fleet = Fleet()
    fleet.update(1, a=3)
    fleet.now += 600
    assert fleet.names(Constraint()) == ["a"]
    fleet.update(1, a=3)
    assert fleet.names(Constraint()) == ["a"]
    for _ in range(4):
        fleet.now += 2
        fleet.update(1, a=3)
    assert fleet.names(Constraint()) == []


def test_one_that_did_not_answer_is_asked_last_for_a_while() -> None:
    fleet = Fleet()
    fleet.update(1, a=3, b=3)
    fleet.view.shun(next(m for m in fleet.view.usable() if m.name == "a"))
    assert all(fleet.names(Constraint(), "a")[0] == "b" for _ in range(4))
    fleet.now += 3
    assert fleet.names(Constraint(), "a")[0] == "a"
