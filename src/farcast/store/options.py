"""Options of the remote stores, checked before anything is sent.

Refuses unknown names, plain HTTP to another machine (unless `allow_http`), and an endpoint
that carries credentials. No value is ever repeated in a message, and no option has a repr.
"""

import ipaddress
import os
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar
from urllib.parse import urlsplit

import msgspec
from obstore.store import AzureStore, GCSStore, S3Store

from farcast.errors import ConfigError, InvalidKeyError
from farcast.store.failures import Place
from farcast.store.keys import check_prefix
from farcast.store.remote import FOREIGN_ERRORS, Connect, Patience, RemoteStore

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

Credentials = Callable[[], Mapping[str, Any]]


class RemoteOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of every remote store. What is not given comes from the provider's usual
    environment variables (AWS_*, GOOGLE_*, AZURE_*) or from the machine's own identity."""

    endpoint: str = ""
    """URL of the server when it is not the provider's own."""
    allow_http: bool = False
    """Send weights and trajectories in clear to another machine."""
    retries: Annotated[int, msgspec.Meta(ge=0, le=20)] = 4
    """Further tries of one request, with growing random pauses, where the error allows it."""
    timeout: Annotated[float, msgspec.Meta(gt=0, le=3600)] = 60.0
    """Seconds one small request may take, and a download may be silent."""
    credentials: Any = None
    """A callable that returns the credentials of this moment as a mapping (see the subclass,
    and optionally `expires_at`, an aware datetime). Called again before they expire, and when
    the store refuses them."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(...)"


class S3Options(RemoteOptions, frozen=True, kw_only=True):
    """`credentials` returns access_key_id, secret_access_key and optionally token."""

    region: str = ""
    access_key_id: str = ""
    secret_access_key: str = ""
    session_token: str = ""
    anonymous: bool = False
    virtual_hosted_style: bool = False
    """The endpoint already holds the bucket's name."""
    checksum: Literal["when_required", "when_supported"] = "when_required"
    """Puts are always signed over the SHA-256 of their body. "when_supported" adds the newer
    x-amz-checksum headers, which S3 keeps with the object and some compatible servers refuse."""


class GcsOptions(RemoteOptions, frozen=True, kw_only=True):
    """`credentials` returns token."""

    bearer_token: str = ""
    service_account: str = ""
    """Path of a service account's JSON file."""
    anonymous: bool = False


class AzureOptions(RemoteOptions, frozen=True, kw_only=True):
    """`credentials` returns one of access_key, sas_token or token."""

    account_name: str = ""
    account_key: str = ""
    sas_token: str = ""
    anonymous: bool = False


_O = TypeVar("_O", bound=RemoteOptions)

_BUCKET = re.compile(r"[A-Za-z0-9$][A-Za-z0-9._-]{0,254}")

_ENDPOINT_VARIABLES = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
"""Where the providers' own tools look for an endpoint, in their order."""


def open_remote(scheme: str, rest: str, options: Mapping[str, Any]) -> RemoteStore:
    """The store at `scheme://rest`, where `rest` is `bucket/prefix` without secrets."""
    bucket, _, prefix = rest.partition("/")
    prefix = prefix.strip("/")
    if not _BUCKET.fullmatch(bucket):
        raise ConfigError(f"The {scheme}:// URL names no bucket; write {scheme}://bucket/prefix.")
    try:
        check_prefix(f"{prefix}/" if prefix else "")
    except InvalidKeyError as error:
        raise ConfigError(f"The prefix in the {scheme}:// URL is wrong: {error}") from None
    url = f"{scheme}://{bucket}/{prefix}".rstrip("/")
    if scheme == "s3":
        s3 = _options(scheme, options, S3Options)
        return _store(url, prefix, s3, _connect_s3(bucket, s3), s3.checksum == "when_supported")
    if scheme == "gs":
        gcs = _options(scheme, options, GcsOptions)
        return _store(url, prefix, gcs, _connect_gcs(bucket, gcs))
    azure = _options(scheme, options, AzureOptions)
    return _store(url, prefix, azure, _connect_azure(bucket, azure))


def _options(scheme: str, given: Mapping[str, Any], kind: type[_O]) -> _O:
    named = filter(None, (os.environ.get(name) for name in _ENDPOINT_VARIABLES[scheme]))
    try:
        options = msgspec.convert({"endpoint": next(named, ""), **given}, kind)
    except msgspec.ValidationError as error:
        known = ", ".join(kind.__struct_fields__)
        raise ConfigError(f"A store option is wrong: {error}; the options are {known}.") from None
    if options.credentials is not None and not callable(options.credentials):
        raise ConfigError("The option credentials must be callable; pass a function.")
    return options


def _store(
    url: str, prefix: str, options: RemoteOptions, connect: Connect, checksums: bool = False
) -> RemoteStore:
    store = RemoteStore(
        Place(url, options.endpoint, checksums),
        prefix,
        connect,
        patience=Patience(retries=options.retries, timeout=options.timeout),
        allow_http=_http_allowed(options),
        renewable=options.credentials is not None,
        tree_lists=url.startswith("s3:") and bool(options.endpoint),
    )
    failure: ConfigError | None = None
    try:
        store.check_settings()
    except FOREIGN_ERRORS as error:
        # obstore's text may repeat a setting's value, so only its kind is told.
        failure = ConfigError(
            f"The settings of {url} are incomplete or wrong ({type(error).__name__}); check its "
            "options and the provider's environment variables (account or project, key, region)."
        )
    if failure is not None:
        raise failure
    return store


def _http_allowed(options: RemoteOptions) -> bool:
    if not options.endpoint:
        return options.allow_http
    parts = urlsplit(options.endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            "The endpoint (option or environment) is no URL; write it like https://host:port."
        )
    if parts.username is not None or parts.query or parts.fragment:
        raise ConfigError(
            "The endpoint holds a user, a query or a fragment; give credentials by the "
            "environment or by their own options."
        )
    if parts.scheme == "https" or options.allow_http or _is_loopback(parts.hostname):
        return True
    raise ConfigError(
        f"The endpoint {options.endpoint} is plain HTTP to another machine, which sends weights "
        "in clear; use https, or set allow_http=True if the network is trusted."
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _given(**values: Any) -> dict[str, Any]:
    """What the user set: an empty value leaves the environment's in force."""
    return {name: value for name, value in values.items() if value not in ("", False, None)}


def _provider(
    credentials: Credentials | None, allowed: tuple[str, ...]
) -> Callable[[], dict[str, Any]] | None:
    if credentials is None:
        return None

    def provide() -> dict[str, Any]:
        now = dict(credentials())
        return {"expires_at": now.get("expires_at"), **{k: now[k] for k in allowed if k in now}}

    return provide


def _connection(
    kind: Callable[..., "ObjectStore"],
    bucket: str,
    config: Mapping[str, Any],
    provider: Callable[[], dict[str, Any]] | None,
) -> Connect:
    def connect(client: "ClientConfig", retry: "RetryConfig") -> "ObjectStore":
        return kind(
            bucket,
            config=config,
            client_options=client,
            retry_config=retry,
            credential_provider=provider,
        )

    return connect


def _connect_s3(bucket: str, options: S3Options) -> Connect:
    config = _given(
        endpoint=options.endpoint,
        region=options.region,
        access_key_id=options.access_key_id,
        secret_access_key=options.secret_access_key,
        session_token=options.session_token,
        skip_signature=options.anonymous,
        virtual_hosted_style_request=options.virtual_hosted_style,
        checksum_algorithm="sha256" if options.checksum == "when_supported" else "",
    )
    # One DELETE per object: the bulk call is missing from several compatible servers, and
    # insists on a checksum header.
    config |= {"conditional_put": "etag", "disable_bulk_delete": True, "disable_tagging": True}
    provider = _provider(options.credentials, ("access_key_id", "secret_access_key", "token"))
    return _connection(S3Store, bucket, config, provider)


def _connect_gcs(bucket: str, options: GcsOptions) -> Connect:
    config = _given(
        base_url=options.endpoint,
        bearer_token=options.bearer_token,
        service_account=options.service_account,
        skip_signature=options.anonymous,
    )
    return _connection(GCSStore, bucket, config, _provider(options.credentials, ("token",)))


def _connect_azure(container: str, options: AzureOptions) -> Connect:
    config = _given(
        endpoint=options.endpoint,
        account_name=options.account_name,
        account_key=options.account_key,
        sas_key=options.sas_token,
        skip_signature=options.anonymous,
    )
    provider = _provider(options.credentials, ("access_key", "sas_token", "token"))
    return _connection(AzureStore, container, config, provider)
