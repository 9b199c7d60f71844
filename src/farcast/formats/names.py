"""Canonical tensor names: those a plain checkpoint has, whatever wraps the module. Pure.

Wrappers put their own attribute into names: `torch.compile` `_orig_mod`, FSDP
`_fsdp_wrapped_module`, activation checkpointing `_checkpoint_wrapped_module`, DDP a leading
`module`. The first three are reserved words and go wherever they stand. `module` is a fair name
for a layer, so it goes only where a wrapper must have put it: in front of every name, or of every
name that another wrapper stands in front of. One name without it shows that it is a layer's.
"""

from collections.abc import Iterable

from farcast.errors import TensorMismatchError

_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_DDP = "module"


def canonical_names(names: Iterable[str]) -> dict[str, str]:
    """Each given name with its canonical one, in the order given.

    Raises `TensorMismatchError` when two names would become one.
    """
    given = list(names)
    bare = {name: _without_wrappers(name.split(".")) for name in given}
    wrapped = [name for name in given if name.partition(".")[0] in _WRAPPERS]
    for together in (wrapped, given):
        if together and all(bare[name][0] == _DDP and len(bare[name]) > 1 for name in together):
            bare |= {name: bare[name][1:] for name in together}
    out = {name: ".".join(parts) for name, parts in bare.items()}
    owners: dict[str, str] = {}
    for name, canonical in out.items():
        if canonical in owners:
            raise TensorMismatchError(
                f"The tensors {owners[canonical][:80]!r} and {name[:80]!r} would both be "
                f"{canonical[:80]!r}; publish only one of them."
            )
        owners[canonical] = name
    return out


def _without_wrappers(parts: list[str]) -> list[str]:
    return [part for part in parts if part not in _WRAPPERS]
