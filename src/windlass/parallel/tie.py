"""A tied embedding whose two ends are two pipeline stages: one parameter, and a mirror of it.

The embedding on the first stage is the parameter: it alone has a record, optimizer states and a place in checkpoints. The
head on the last stage is a mirror. V: the size of the vocabulary, D: the hidden size, so that each end has V D elements:

    before a step    head <- embedding                      a message of V D elements, first rank -> last rank
    after backward   grad embedding += grad head            a message of V D elements, last rank -> first rank

so both ends are equal at every step, whatever changed the embedding in between (optimizer, restore), and nothing is counted
twice. Under FSDP each rank sends its own shard. Beside masters the values are those in 16 bits, and each end's master has the
gradient. Where both stages are on one rank (zbv) no message is sent, but the sum is still needed: they are two parameters there
too, because one Parameter shared by two of torch's stages gets a wrong gradient.

    kept     V D elements of weights (and of masters) and gradients more on the last rank; a second stepped copy would keep its
             moments too
    sent     2 V D elements per step, V D per evaluation
"""

from collections.abc import Mapping
from typing import Final

import torch
import torch.distributed as dist
from torch.nn import Parameter

from windlass.parallel.records import NO_MASTERS
from windlass.ranks.owned_part import local_part

EMBEDDING: Final = "model.embed_tokens.weight"
HEAD: Final = "lm_head.weight"


class Tie:
    """`embedding` is None except on the first stage's rank, `head` except on the last's; `first`, `last`: those ranks in
    `group`. `masters`: masters.py's, by name, which have the gradients."""

    def __init__(
        self,
        embedding: Parameter | None,
        head: Parameter | None,
        group: dist.ProcessGroup,
        first: int,
        last: int,
        masters: Mapping[str, Parameter] = NO_MASTERS,
    ):
        self._embedding, self.head = embedding, head
        self._embedding_sum = None if embedding is None else masters.get(EMBEDDING, embedding)
        self.head_sum = None if head is None else masters.get(HEAD, head)
        self._group, self._first, self._last = group, first, last

    @torch.no_grad()
    def spread(self) -> None:
        """The embedding's values, into its mirror."""
        if self._embedding is not None and self.head is not None:
            local_part(self.head).copy_(local_part(self._embedding))
        elif self._embedding is not None:
            dist.send(local_part(self._embedding), group=self._group, group_dst=self._last)
        elif self.head is not None:
            dist.recv(local_part(self.head), group=self._group, group_src=self._first)

    @torch.no_grad()
    def collect(self) -> None:
        """The mirror's gradient, into the embedding's; nothing where they are frozen, as both ends are then."""
        if not any(end.requires_grad for end in (self._embedding, self.head) if end is not None):
            return
        given = None if self.head_sum is None else _gradient(self.head_sum)
        if self._embedding_sum is None:
            if given is not None:
                dist.send(given, group=self._group, group_dst=self._first)
        else:
            gradient = _gradient(self._embedding_sum)
            if given is None:
                given = torch.empty_like(gradient)
                dist.recv(given, group=self._group, group_src=self._last)
            gradient.add_(given)
        if self.head_sum is not None:
            self.head_sum.grad = None


def _gradient(parameter: Parameter) -> torch.Tensor:
    assert parameter.grad is not None, "both ends of the tie take part in the loss"
    return local_part(parameter.grad).contiguous()
