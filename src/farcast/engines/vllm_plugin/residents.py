"""The resident of each model in this process: the transfer engine and the worker extension are
made by vLLM, apart from each other, and meet here."""

from typing import Any
from weakref import WeakKeyDictionary

from farcast.engines.vllm_plugin.resident import Load, Resident
from farcast.errors import TargetError

_residents: "WeakKeyDictionary[Any, Resident]" = WeakKeyDictionary()


def make_resident(model: Any, member: int, load: Load) -> Resident:
    """The resident of `model`, made if there is none."""
    if model not in _residents:
        _residents[model] = Resident(model, member, load)
    return _residents[model]


def resident_of(model: Any) -> Resident:
    found = _residents.get(model)
    if found is None:
        raise TargetError("Nobody attached to this engine yet; attach first.")
    return found
