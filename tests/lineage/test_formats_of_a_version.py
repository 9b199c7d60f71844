"""One manifest, several served formats: each is seen as if it were the only one."""

import msgspec
import pytest
from msgspec.structs import replace

from farcast.errors import FormatError, UnknownVersionError
from farcast.lineage import (
    Delta,
    Manifest,
    ObjectRef,
    check_manifest,
    decode_manifest,
    encode_manifest,
    first_kept,
    joined,
    plan,
)


def ref(text: str, size: int = 10) -> ObjectRef:
    return ObjectRef(digest=(text * 64)[:64], size=size)


def manifest(version: int, served_format: str, mark: str, *, anchor: int = 0) -> Manifest:
    return Manifest(
        run_id="run1",
        version=version,
        root=(f"{version}{mark}" * 32)[:64],
        step=version,
        served_format=served_format,
        tensors=1,
        elements=4,
        bytes_full=8,
        changed=0,
        anchor_version=anchor,
        anchor=(ref(f"{version}{mark}a"),) if anchor == version else None,
        deltas=(
            Delta(
                base=version - 1,
                base_root=(f"{version - 1}{mark}" * 32)[:64],
                objects=(ref(f"{version}{mark}d"),),
            ),
        )
        if version
        else (),
        writer="w",
    )


def both(version: int) -> Manifest:
    return joined([manifest(version, "bf16", "a"), manifest(version, "int8", "b")])


def test_each_view_is_what_a_run_in_that_format_alone_would_have() -> None:
    whole = both(3)
    assert whole.served_formats == ("bf16", "int8")
    assert whole.view("bf16") == manifest(3, "bf16", "a")
    assert whole.view("int8") == manifest(3, "int8", "b")
    assert whole.view("int8").view("int8") == manifest(3, "int8", "b")
    assert joined(whole.views) == whole
    assert len(whole.objects) == 2
    with pytest.raises(UnknownVersionError, match="bf16, int8"):
        whole.view("fp8_block")


def test_it_is_read_back_and_one_format_alone_is_written_as_ever() -> None:
    whole = both(0)
    assert decode_manifest(encode_manifest(whole), run_id="run1", version=0) == whole
    alone = msgspec.json.decode(encode_manifest(manifest(0, "bf16", "a")))
    assert not {"also", "precision_rule"} & alone.keys()


def test_every_format_is_checked() -> None:
    whole = both(1)
    assert isinstance(whole.also, dict)
    wrong = replace(whole.also["int8"], anchor_version=2)
    with pytest.raises(FormatError, match="anchor newer than itself"):
        check_manifest(replace(whole, also={"int8": wrong}))
    with pytest.raises(FormatError, match="one served format twice"):
        check_manifest(replace(whole, also={"bf16": whole.also["int8"]}))
    data = encode_manifest(whole).replace(b'"also":{', b'"also":{"../x":1,')
    with pytest.raises(FormatError):
        decode_manifest(data, run_id="run1", version=1)


def test_plans_lead_through_one_format() -> None:
    run = {version: both(version) for version in range(4)}
    for served_format in ("bf16", "int8"):
        views = {version: whole.view(served_format) for version, whole in run.items()}
        found = plan(views[1].ref, views[3].ref, views)
        assert [step.root for step in found.steps] == [views[2].root, views[3].root]
        with pytest.raises(UnknownVersionError):
            plan(None, run[3].view("bf16").ref, {v: m.view("int8") for v, m in run.items()})


def test_what_any_format_needs_is_kept() -> None:
    """bf16 was published in full at 2, int8 not since 1."""
    run = {0: both(0)}
    for version in (1, 2, 3):
        a = manifest(version, "bf16", "a", anchor=2 if version >= 2 else 0)
        b = manifest(version, "int8", "b", anchor=1)
        run[version] = joined([a, b])
    assert first_kept(run, keep=1) == 1
