"""Exchanged weights are noticed wherever they were exchanged."""

import torch

from farcast.engines.vllm_plugin.holders import Holders
from farcast.engines.vllm_plugin.tracing import _memories


def nested() -> torch.nn.Module:
    block = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))
    return torch.nn.Sequential(block, torch.nn.BatchNorm1d(2))


def test_a_model_left_alone_still_holds() -> None:
    model = nested()
    holders = Holders(model, _memories(model)[0])
    with torch.no_grad():
        model[0][0].weight.add_(1)
    assert holders.still_hold()


def test_an_exchanged_parameter_buffer_or_module_is_noticed() -> None:
    for exchange in (
        lambda model: setattr(model[0][0], "weight", torch.nn.Parameter(torch.ones(2, 3))),
        lambda model: setattr(model[0][1].weight, "data", torch.ones(2, 2)),
        lambda model: model[1].register_buffer("running_mean", torch.ones(2)),
        lambda model: setattr(model[0], "1", torch.nn.Linear(2, 2)),
        lambda model: setattr(model, "0", model[0][1]),
        lambda model: delattr(model[0][0], "bias"),
    ):
        model = nested()
        holders = Holders(model, _memories(model)[0])
        exchange(model)
        assert not holders.still_hold()


def test_a_memory_may_move_to_another_place_of_the_model() -> None:
    model = nested()
    holders = Holders(model, _memories(model)[0])
    model[0] = torch.nn.Sequential(*model[0])
    assert holders.still_hold()
