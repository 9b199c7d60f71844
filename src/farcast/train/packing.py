"""A group as few forward passes as possible.

The members of a group share their prompt, which is most of the tokens of a short answer. A pack
is one sequence: the shared beginning once, then what each member has after it. A mask lets each
member see the shared part and itself, and positions start again after the shared part, so every
log-prob is the one that the member alone would give.

Shapes: L tokens of the pack, N tokens in the loss.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch

from farcast.trajectory import Trajectory

MAX_PACK_TOKENS = 2048
"""The mask is quadratic: 2048 tokens are 16 MiB of it."""


class Pack(NamedTuple):
    """Inputs of one forward pass, and what the loss needs of its outputs."""

    token_ids: torch.Tensor
    """[L] int64"""
    positions: torch.Tensor
    """[L] int64"""
    visible: torch.Tensor
    """[L, L] bool: row i may look at column j."""
    predictors: torch.Tensor
    """[N] int64: the place in the pack whose output predicts the target."""
    targets: torch.Tensor
    """[N] int64"""
    behaviour: torch.Tensor
    """[N] float32: log-probs recorded at sampling."""
    advantages: torch.Tensor
    """[N] float32"""
    lengths: torch.Tensor
    """[N] float32: tokens in the loss of the answer that a token belongs to."""
    ages: torch.Tensor
    """[N] int64: versions between the one that wrote the token and the trainer's."""
    rows: torch.Tensor
    """[L] int64: the member, from 1, that a token of the pack belongs to; 0 for the shared part."""
    owners: torch.Tensor
    """[N] int64: the same for the targets."""
    temperature: float


class _Tail(NamedTuple):
    """What a member has after the shared part, and where in it the loss is."""

    token_ids: tuple[int, ...]
    in_loss: list[int]
    behaviour: list[float]
    ages: list[int]
    advantage: float


def shared_length(members: Sequence[Trajectory]) -> int:
    """Tokens at the beginning that all members share and none has in its loss; at least the
    first token, since nothing predicts it."""
    first = members[0].token_ids
    length = min(len(member.token_ids) for member in members)
    for member in members:
        same = next((i for i in range(length) if member.token_ids[i] != first[i]), length)
        masked = next((i for i in range(same) if member.loss_mask[i]), same)
        length = min(length, same, masked)
    return max(length, 1)


def pack_group(
    members: Sequence[Trajectory],
    advantages: Sequence[float],
    *,
    version: int,
    most: int = MAX_PACK_TOKENS,
) -> Iterator[Pack]:
    """Packs of at most `most` tokens; a longer member gets one of its own. `version` is the
    trainer's, from which the tokens' ages are counted."""
    shared = shared_length(members)
    prefix = members[0].token_ids[:shared]
    waiting: list[_Tail] = []
    size = shared
    for member, advantage in zip(members, advantages, strict=True):
        tail = _tail(member, shared, advantage, version)
        if waiting and size + len(tail.token_ids) > most:
            yield _pack(prefix, waiting, members[0].temperature)
            waiting, size = [], shared
        waiting.append(tail)
        size += len(tail.token_ids)
    if waiting:
        yield _pack(prefix, waiting, members[0].temperature)


def without(pack: Pack, members: Collection[int]) -> tuple[Pack, torch.Tensor]:
    """The pack without some members, numbered from 1, and which targets stayed ([N] bool). The
    others' log-probs are those that they had."""
    gone = torch.tensor(sorted(members), dtype=torch.long)
    kept, rows = ~torch.isin(pack.owners, gone), ~torch.isin(pack.rows, gone)
    place = rows.cumsum(0) - 1
    smaller = pack._replace(
        token_ids=pack.token_ids[rows],
        positions=pack.positions[rows],
        visible=pack.visible[rows][:, rows],
        rows=pack.rows[rows],
        predictors=place[pack.predictors[kept]],
        targets=pack.targets[kept],
        behaviour=pack.behaviour[kept],
        advantages=pack.advantages[kept],
        lengths=pack.lengths[kept],
        ages=pack.ages[kept],
        owners=pack.owners[kept],
    )
    return smaller, kept


def token_ages(member: Trajectory, version: int) -> list[int]:
    """For each token, how many versions ago it was written; 0 for tokens that no model wrote."""
    ages = [0] * len(member.token_ids)
    for span in member.spans:
        ages[span.start : span.end] = [version - span.version] * (span.end - span.start)
    return ages


def _tail(member: Trajectory, shared: int, advantage: float, version: int) -> _Tail:
    ages = token_ages(member, version)
    in_loss = [i for i in range(shared, len(member.token_ids)) if member.loss_mask[i]]
    return _Tail(
        token_ids=member.token_ids[shared:],
        in_loss=[i - shared for i in in_loss],
        behaviour=[member.logprobs[i] for i in in_loss],
        ages=[ages[i] for i in in_loss],
        advantage=advantage,
    )


def _pack(prefix: Sequence[int], tails: Sequence[_Tail], temperature: float) -> Pack:
    shared = len(prefix)
    tokens, positions, owners = list(prefix), list(range(shared)), [0] * shared
    predictors: list[int] = []
    targets: list[int] = []
    behaviour: list[float] = []
    advantages: list[float] = []
    lengths: list[int] = []
    ages: list[int] = []
    owned: list[int] = []
    for owner, tail in enumerate(tails, start=1):
        begin = len(tokens)
        # The first token after the shared part is predicted by the last shared one.
        predictors += [shared - 1 if i == 0 else begin + i - 1 for i in tail.in_loss]
        targets += [tail.token_ids[i] for i in tail.in_loss]
        behaviour += tail.behaviour
        advantages += [tail.advantage] * len(tail.in_loss)
        lengths += [len(tail.in_loss)] * len(tail.in_loss)
        ages += tail.ages
        owned += [owner] * len(tail.in_loss)
        read = tail.token_ids[:-1]  # nothing is predicted from the last token
        tokens += read
        positions += range(shared, shared + len(read))
        owners += [owner] * len(read)
    owner_of = torch.tensor(owners)
    same = (owner_of[:, None] == owner_of[None, :]) | (owner_of[None, :] == 0)
    return Pack(
        token_ids=torch.tensor(tokens),
        positions=torch.tensor(positions),
        visible=same.tril(),
        predictors=torch.tensor(predictors, dtype=torch.long),
        targets=torch.tensor(targets, dtype=torch.long),
        behaviour=torch.tensor(behaviour, dtype=torch.float32),
        advantages=torch.tensor(advantages, dtype=torch.float32),
        lengths=torch.tensor(lengths, dtype=torch.float32),
        ages=torch.tensor(ages, dtype=torch.long),
        rows=owner_of,
        owners=torch.tensor(owned, dtype=torch.long),
        temperature=temperature,
    )
