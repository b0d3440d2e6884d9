"""Requests that run: what of them is backed up, and what is saved of one that is retracted."""

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch

from ...ranks.protocol.config import WritePolicy
from ..items import ItemNames
from .engine.contract import Handle, Lock, SglangRequest
from .items import TEXT_ALONE, PromptItems
from .lent_backups import LentBackups
from .pools.slots import AttentionSlots
from .waiting import Waiting

Kept: TypeAlias = tuple[Lock, torch.Tensor, torch.Tensor | None]
"""What keeps tokens in the tree, their slots, and the slot of the state after them, if there is one."""


@dataclass(slots=True, eq=False)
class _Running:
    """A request that was admitted."""

    namespace: str
    prompt: PromptItems
    shared: int
    """How many of its tokens had been computed for somebody before."""
    backed_up: int = 0
    """How many were offered for backup."""


@dataclass(slots=True)
class RunningRequests:
    """The requests that run and may be cached, by SGLang's handles."""

    backups: LentBackups
    slots: AttentionSlots
    write_policy: WritePolicy
    names: ItemNames
    _known: dict[Handle, _Running] = field(default_factory=dict[Handle, _Running])
    _saved_by: dict[Handle, str] = field(default_factory=dict[Handle, str])
    """The backups of retracted requests, until these wait again."""

    def __contains__(self, handle: Handle) -> bool:
        """Say whether a request runs whose pages may be backed up."""
        return handle in self._known

    def admitted(self, handle: Handle, waiting: Waiting) -> None:
        """Take note that a request is in the batch."""
        self._known[handle] = _Running(waiting.namespace, waiting.prompt, waiting.prefix)

    def computed(
        self, request: SglangRequest, tree_tokens: int, keep: Callable[[int], Kept]
    ) -> None:
        """Back up what the tree has of a request, which is `tree_tokens`.

        `keep` locks so many of the first tokens, or fewer.
        """
        running = self._known[request.cache_request_handle]
        count = tree_tokens
        if self.write_policy is WritePolicy.WRITE_THROUGH_SELECTIVE:
            count = min(count, running.shared)
        if count <= running.backed_up or not self.names.trusted(running.prompt.items):
            return
        running.backed_up = count
        lock, slots, state = keep(count)
        tokens = token_bytes(request.full_untruncated_fill_ids, len(slots), running.prompt)
        self.backups.keep(tokens, self.slots.pages_of(slots, state), running.namespace, lock)

    def retracted(self, request: SglangRequest, row: torch.Tensor) -> None:
        """Save what can be saved of a request whose slots, in its `row`, are given away at once.

        Returns when they may be overwritten on this rank.
        """
        running = self._known[request.cache_request_handle]
        count, state = self.slots.computed(request)
        if count <= running.backed_up or not self.names.trusted(running.prompt.items):
            return
        known = array("q", request.origin_input_ids)
        known.extend(request.output_ids)
        pages = self.slots.pages_of(row[:count].to(torch.int64), state)
        tokens = token_bytes(known, count, running.prompt)
        name = self.backups.save(tokens, pages, running.namespace)
        if name is not None:
            self._saved_by[request.cache_request_handle] = name

    def saved_by(self, handle: Handle) -> str | None:
        """Return the backup that a retracted request has to wait for, once."""
        return self._saved_by.pop(handle, None)

    def left(self, handle: Handle) -> None:
        """Take note that a request runs no more: it has ended, or waits again."""
        self._known.pop(handle, None)

    def ended(self, handle: Handle) -> None:
        """Forget a request that is not going to run again."""
        self._known.pop(handle, None)
        self._saved_by.pop(handle, None)

    def begin_anew(self) -> None:
        """Back up nothing of the requests that run now: what they have is not to be found."""
        self._known.clear()
        self._saved_by.clear()


def token_bytes(tokens: "array[int]", count: int, prompt: PromptItems = TEXT_ALONE) -> bytes:
    """Return the first tokens of a request as ids in keys; `prompt` says what it begins with."""
    return prompt.ids(np.frombuffer(tokens, dtype=np.int64)[:count])
