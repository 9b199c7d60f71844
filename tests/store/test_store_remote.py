"""S3 as servers really answer: conflicts, lost replies, expired keys, old checksums, silence."""

import logging
import socket
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import pytest

from farcast.errors import (
    ConfigError,
    FarcastError,
    IntegrityError,
    LimitError,
    ObjectExistsError,
    ObjectNotFoundError,
    StoreAccessError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
    StoreUnsupportedError,
)
from farcast.store import Store, open_store, probe_conditional_put
from s3_stub import Answer, S3Stub, Seen
from servers import SECRET, Bucket, free_ports, signed_put_url


def answers(*script: Answer | None) -> Callable[[Seen], Answer | None]:
    """The scripted answers to puts, in turn; then none."""
    left = list(script)

    def respond(seen: Seen) -> Answer | None:
        return left.pop(0) if left and seen.method == "PUT" else None

    return respond


# --- conditional create ------------------------------------------------------------------------


def test_case_053_conflict_with_nothing_stored_is_tried_again(stub: S3Stub) -> None:
    stub.respond = answers(*[Answer(409, "ConditionalRequestConflict")] * 2)
    stub.open().put("versions/1", b"x", if_absent=True)
    assert stub.objects == {"run/versions/1": b"x"}
    assert stub.methods().count("PUT") == 3


def test_case_053_precondition_failed_is_final(stub: S3Stub) -> None:
    stub.respond = answers(Answer(412, "PreconditionFailed"))
    with pytest.raises(ObjectExistsError):
        stub.open().put("k", b"x", if_absent=True)
    assert stub.methods() == ["PUT"]


def test_conflict_about_an_object_that_is_there_is_final(stub: S3Stub) -> None:
    stub.objects["run/k"] = b"other"
    stub.respond = answers(Answer(409, "BlobAlreadyExists"))
    with pytest.raises(ObjectExistsError):
        stub.open().put("k", b"x", if_absent=True)
    assert stub.methods() == ["PUT", "HEAD"]


def test_endless_conflict_ends_as_unavailable(stub: S3Stub) -> None:
    stub.respond = lambda seen: Answer(409) if seen.method == "PUT" else None
    with pytest.raises(StoreUnavailableError):
        stub.open().put("k", b"x", if_absent=True)
    assert stub.methods().count("PUT") == 3
    assert stub.objects == {}


def test_lost_reply_of_a_create_shows_as_exists(stub: S3Stub) -> None:
    stub.respond = answers(Answer(200, store=True, drop=True))
    with pytest.raises(ObjectExistsError):
        stub.open().put("k", b"mine", if_absent=True)
    assert stub.open().get("k", max_bytes=10) == b"mine"


def test_lost_reply_of_an_overwrite_is_tried_again(stub: S3Stub) -> None:
    stub.respond = answers(Answer(200, store=True, drop=True))
    stub.open().put("k", b"mine")
    assert stub.objects == {"run/k": b"mine"}


def test_server_that_ignores_conditions_is_found_out(stub: S3Stub) -> None:
    stub.honest = False
    with pytest.raises(StoreUnsupportedError, match="conditional creates"):
        probe_conditional_put(stub.open())
    assert stub.objects == {}


def test_server_that_checks_too_early_is_found_out(stub: S3Stub) -> None:
    """It looks, waits, then writes: only a race shows it."""
    stub.honest = False

    def respond(seen: Seen) -> Answer | None:
        return Answer(412) if seen.method == "PUT" and seen.key in stub.objects else None

    stub.respond = respond
    stub.before_put = lambda: time.sleep(0.1)
    with pytest.raises(StoreUnsupportedError, match="racing"):
        probe_conditional_put(stub.open())


# --- tries are bounded -------------------------------------------------------------------------


@pytest.mark.parametrize("status", [500, 503, 429])
def test_passing_trouble_is_waited_out(stub: S3Stub, status: int) -> None:
    stub.respond = answers(Answer(status), Answer(status))
    stub.open().put("k", b"x")
    assert stub.objects == {"run/k": b"x"}


@pytest.mark.parametrize("status", [500, 503, 429])
@pytest.mark.parametrize("if_absent", [False, True])
def test_lasting_trouble_is_reported_after_few_tries(
    stub: S3Stub, status: int, if_absent: bool
) -> None:
    stub.respond = lambda _: Answer(status)
    start = time.monotonic()
    with pytest.raises(StoreUnavailableError, match=str(status)) as caught:
        stub.open().put("k", b"x", if_absent=if_absent)
    assert caught.value.retry
    assert len(stub.seen) == 3
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("status", [400, 403, 405])
def test_refusals_are_not_tried_again(stub: S3Stub, status: int) -> None:
    stub.respond = lambda _: Answer(status)
    with pytest.raises(StoreError) as caught:
        stub.open().get("k", max_bytes=10)
    assert not caught.value.retry
    assert len(stub.seen) == 1


def test_silent_server_times_out(stub: S3Stub) -> None:
    stub.before_put = lambda: time.sleep(1)
    with pytest.raises(StoreUnavailableError):
        stub.open(timeout=0.2, retries=1).put("k", b"x")


def test_unreachable_server_is_one_clear_sentence() -> None:
    (port,) = free_ports(1)
    store = open_store(
        "s3://bucket/run",
        endpoint=f"http://127.0.0.1:{port}",
        access_key_id="k",
        secret_access_key=SECRET,
        retries=1,
    )
    for call in (
        lambda: store.get("k", max_bytes=1),
        lambda: store.put("k", b"", if_absent=True),
        lambda: list(store.list("")),
        lambda: store.delete("k"),
    ):
        with pytest.raises(StoreUnavailableError, match="cannot be reached"):
            call()


def test_full_bucket(stub: S3Stub) -> None:
    for answer in (Answer(507), Answer(403, "QuotaExceeded"), Answer(400, "XMinioStorageFull")):
        stub.respond = lambda _, answer=answer: answer
        with pytest.raises(StoreFullError):
            stub.open(retries=0).put("k", b"x")


def test_a_server_that_comes_back_is_used_again() -> None:
    (port,) = free_ports(1)
    with S3Stub(port=port) as first:
        store = first.open(retries=0)
        store.put("k", b"x")
    with pytest.raises(StoreUnavailableError):
        store.get("k", max_bytes=1)
    with S3Stub(port=port, objects=first.objects):
        assert store.get("k", max_bytes=1) == b"x"


# --- bodies ------------------------------------------------------------------------------------


def test_get_refuses_by_the_size_before_the_body(stub: S3Stub) -> None:
    stub.objects["run/k"] = b"x"
    stub.claimed_size = 1 << 50
    with pytest.raises(LimitError, match=str(1 << 50)):
        stub.open().get("k", max_bytes=1000)


def test_body_that_breaks_off_is_never_returned(stub: S3Stub) -> None:
    stub.objects["run/k"] = b"x" * 1000
    stub.claimed_size = 2000
    with pytest.raises(IntegrityError, match="shorter"):
        stub.open().get("k", max_bytes=5000)


def test_server_without_ranges_is_refused(stub: S3Stub) -> None:
    stub.objects["run/k"] = b"x" * 1000
    stub.ranges = False
    with pytest.raises(StoreError):
        stub.open().get_range("k", 10, 10)


def test_prefixes_are_separate(stub: S3Stub) -> None:
    one, other = stub.open("run"), stub.open("run-2")
    one.put("k", b"1")
    other.put("k", b"2")
    assert [info.key for info in one.list("")] == ["k"]
    assert one.get("k", max_bytes=9) == b"1"
    assert [info.key for info in stub.open("").list("")] == ["run-2/k", "run/k"]


def test_foreign_objects_in_the_bucket_are_not_listed(stub: S3Stub) -> None:
    stub.objects = {"run/a b": b"", "run/.hidden": b"", "run/ok": b"", "run2/x": b""}
    assert [info.key for info in stub.open().list("")] == ["ok"]


# --- checksums ---------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [501, 401, 400])
def test_case_047_old_server_that_refuses_checksums(stub: S3Stub, status: int) -> None:
    def respond(seen: Seen) -> Answer | None:
        newer = [name for name in seen.headers if name.startswith("x-amz-checksum-")]
        chunked = "aws-chunked" in seen.headers.get("content-encoding", "")
        return Answer(status, "NotImplemented") if newer or chunked else None

    stub.respond = respond
    stub.open().put("default", b"x", if_absent=True)
    stub.open(checksum="when_required").put("k", b"x" * (9 << 20))
    stub.open(checksum="when_required").delete("k")
    before = len(stub.seen)
    with pytest.raises(StoreError, match="checksum='when_required'"):
        stub.open(checksum="when_supported").put("other", b"x")
    assert len(stub.seen) - before <= 3


def test_puts_are_signed_over_their_content(stub: S3Stub) -> None:
    stub.open().put("k", b"x")
    assert stub.seen[0].headers["x-amz-content-sha256"].startswith("2d711642b726b04401627ca9fbac32")


# --- credentials -------------------------------------------------------------------------------


def expiring(after: int, status: int, code: str) -> Callable[[Seen], Answer | None]:
    """Refuses key A once it has been used `after` times."""
    used = {"A": 0}

    def respond(seen: Seen) -> Answer | None:
        if seen.access_key == "A":
            used["A"] += 1
            return Answer(status, code) if used["A"] > after else None
        return None if seen.access_key == "B" else Answer(403, "InvalidAccessKeyId")

    return respond


def provider(*names: str) -> Callable[[], dict[str, Any]]:
    left = list(names)

    def provide() -> dict[str, Any]:
        name = left.pop(0) if len(left) > 1 else left[0]
        return {"access_key_id": name, "secret_access_key": SECRET, "token": "t"}

    return provide


@pytest.mark.parametrize(("status", "code"), [(400, "ExpiredToken"), (403, "AccessDenied")])
def test_case_057_expired_credentials_are_renewed_in_flight(
    stub: S3Stub, status: int, code: str
) -> None:
    stub.respond = expiring(3, status, code)
    store = stub.open(credentials=provider("A", "B"), access_key_id="", secret_access_key="")
    for number in range(6):
        store.put(f"n{number}", b"x", if_absent=True)
        assert store.get(f"n{number}", max_bytes=1) == b"x"
    assert len(stub.objects) == 6
    assert len(list(store.list(""))) == 6


def test_threads_renew_together(stub: S3Stub) -> None:
    stub.respond = expiring(5, 403, "ExpiredToken")
    store = stub.open(credentials=provider("A", "B"), access_key_id="", secret_access_key="")
    failures: list[StoreError] = []

    def run(number: int) -> None:
        for turn in range(5):
            try:
                store.put(f"t{number}/{turn}", b"x", if_absent=True)
            except StoreError as error:
                failures.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(stub.objects) == 20


def test_a_long_list_goes_on_with_new_credentials(stub: S3Stub) -> None:
    stub.page = 10
    stub.respond = expiring(2, 400, "ExpiredToken")
    stub.objects = {f"run/k{number:03d}": b"" for number in range(55)}
    store = stub.open(credentials=provider("A", "B"), access_key_id="", secret_access_key="")
    assert [info.key for info in store.list("")] == [f"k{number:03d}" for number in range(55)]
    assert {seen.access_key for seen in stub.seen} == {"A", "B"}


def test_a_wrong_clock_is_named(stub: S3Stub) -> None:
    stub.respond = lambda _: Answer(403, "RequestTimeTooSkewed")
    with pytest.raises(StoreAccessError, match="clock"):
        stub.open().put("k", b"x")


def test_a_wrong_region_is_named(stub: S3Stub) -> None:
    stub.respond = lambda _: Answer(400, "AuthorizationHeaderMalformed")
    with pytest.raises(StoreAccessError, match="region"):
        stub.open().put("k", b"x")


def test_credentials_that_stay_refused_end_the_call(stub: S3Stub) -> None:
    stub.respond = lambda _: Answer(403, "ExpiredToken")
    store = stub.open(credentials=provider("A"), access_key_id="", secret_access_key="")
    with pytest.raises(StoreAccessError, match="ExpiredToken"):
        store.put("k", b"x")
    assert len(stub.seen) == 2


def test_failing_provider_is_an_access_error_without_its_words(stub: S3Stub) -> None:
    def fail() -> dict[str, Any]:
        raise RuntimeError(f"could not use {SECRET}")

    store = stub.open(credentials=fail, access_key_id="", secret_access_key="")
    with pytest.raises(StoreAccessError, match="credential") as caught:
        store.put("k", b"x")
    assert SECRET not in everything_said(caught.value)


def test_google_tokens_are_renewed_too(stub: S3Stub) -> None:
    tokens = ["old", "new"]
    stub.respond = lambda seen: (
        Answer(401) if seen.headers.get("authorization") != "Bearer new" else None
    )
    store = stub.open_google(bearer_token="", credentials=lambda: {"token": tokens.pop(0)})
    store.put("k", b"x", if_absent=True)
    assert stub.objects == {"run/k": b"x"}


# --- secrets -----------------------------------------------------------------------------------


def everything_said(error: BaseException) -> str:
    """Text, repr, traceback, and those of every error behind it."""
    texts = ["".join(traceback.format_exception(error))]
    behind: BaseException | None = error
    while behind is not None:
        texts += [str(behind), repr(behind), repr(behind.args)]
        behind = behind.__cause__ or behind.__context__
    return "\n".join(texts)


@pytest.mark.parametrize(
    "answer", [Answer(403), Answer(404, "NoSuchBucket"), Answer(500), Answer(400), Answer(409)]
)
def test_case_103_no_secret_is_ever_said(
    stub: S3Stub, answer: Answer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    store = stub.open(session_token=SECRET, retries=0)
    store.put("fine", b"x")
    stub.respond = lambda _: answer
    said = [repr(store), store.url]
    calls: list[Callable[[], object]] = [
        lambda: store.put("k", b"x"),
        lambda: store.put("k", b"x", if_absent=True),
        lambda: store.get("k", max_bytes=1),
        lambda: store.get_range("k", 0, 1),
        lambda: list(store.list("")),
        lambda: store.delete("k"),
    ]
    for call in calls:
        with pytest.raises(FarcastError) as caught:
            call()
        said.append(everything_said(caught.value))
    assert SECRET not in "\n".join([*said, caplog.text])


@pytest.mark.parametrize(
    ("url", "options"),
    [
        (f"s3://key:{SECRET}@bucket/run", {}),
        (f"s3://bucket/run?X-Amz-Signature={SECRET}", {}),
        (f"s3://bucket/run#{SECRET}", {}),
        ("s3://bucket", {"endpoint": f"https://u:{SECRET}@host"}),
        ("s3://bucket", {"endpoint": f"https://host?sig={SECRET}"}),
        ("s3://bucket", {"secret_access_key": SECRET, "retries": "many"}),
        ("s3://bucket", {"credentials": SECRET}),
        ("s3://bucket", {"access_key_id": ["x"], "secret_access_key": SECRET}),
        ("az://container", {"account_name": "a", "account_key": SECRET}),
        ("gs://bucket", {"service_account": f"/nowhere/{SECRET}.json"}),
    ],
)
def test_bad_settings_are_refused_without_repeating_them(url: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        open_store(url, **options)
    assert SECRET not in everything_said(caught.value)


# --- real servers ------------------------------------------------------------------------------


def test_the_environment_is_enough(seaweed_bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", seaweed_bucket.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testkey")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    store = open_store("s3://farcast/by-environment")
    store.put("k", b"x", if_absent=True)
    assert store.get("k", max_bytes=1) == b"x"


def test_wrong_key_is_an_access_error(seaweed_bucket: Bucket) -> None:
    for wrong in ({"secret_access_key": "wrong"}, {"access_key_id": "nobody"}):
        store = seaweed_bucket.open("run", **wrong)
        calls: list[Callable[[], object]] = [
            lambda store=store: store.get("k", max_bytes=1),
            lambda store=store: store.put("k", b"x", if_absent=True),
            lambda store=store: list(store.list("")),
        ]
        for call in calls:
            with pytest.raises(StoreAccessError, match="credentials"):
                call()


@pytest.mark.parametrize("server", ["seaweed", "moto"])
def test_an_upload_that_breaks_off_leaves_no_object(
    request: pytest.FixtureRequest, server: str
) -> None:
    bucket: Bucket = request.getfixturevalue(f"{server}_bucket")
    store = bucket.open("broken")
    store.put("before", b"x")
    url = urlsplit(signed_put_url(bucket, "broken/half"))
    with socket.create_connection((url.hostname, url.port)) as connection:
        head = f"PUT {url.path}?{url.query} HTTP/1.1\r\nHost: {url.netloc}\r\n"
        connection.sendall(f"{head}Content-Length: 100000\r\n\r\n".encode() + b"x" * 50_000)
    time.sleep(0.3)
    with pytest.raises(ObjectNotFoundError):
        store.get("half", max_bytes=10**6)
    store.put("half", b"whole", if_absent=True)
    assert store.get("half", max_bytes=10**6) == b"whole"


def test_missing_bucket_is_said_and_not_mistaken_for_a_missing_object(moto_bucket: Bucket) -> None:
    store: Store = open_store("s3://no-such-bucket/run", **moto_bucket.options)
    for call in (
        lambda: store.get("k", max_bytes=1),
        lambda: store.put("k", b"x"),
        lambda: store.put("k", b"x", if_absent=True),
        lambda: list(store.list("")),
    ):
        with pytest.raises(StoreAccessError, match="does not exist"):
            call()
    with pytest.raises(ObjectNotFoundError):
        moto_bucket.open("run").get("k", max_bytes=1)


def test_extra_checksums_are_accepted_by_a_current_server(seaweed_bucket: Bucket) -> None:
    store = seaweed_bucket.open("checksums", checksum="when_supported")
    store.put("k", b"x" * (17 << 20))
    store.put("k2", b"x", if_absent=True)
    assert len(store.get("k", max_bytes=17 << 20)) == 17 << 20


def test_many_keys_are_listed_over_several_pages(seaweed_bucket: Bucket) -> None:
    store = seaweed_bucket.open("pages")
    names = [f"versions/{number:012d}.json" for number in range(1100)]

    def run(part: int) -> None:
        for name in names[part::8]:
            store.put(name, b"")

    threads = [threading.Thread(target=run, args=(part,)) for part in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [info.key for info in store.list("versions/")] == names
    after = store.list("versions/", start_after=names[1050])
    assert [info.key for info in after] == names[1051:]
