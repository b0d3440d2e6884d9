"""Running requests: backups of their computed tokens while they run and when SGLang retracts them."""

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
from .pending_tree_backups import PendingTreeBackups
from .pools.slots import AttentionSlots
from .waiting import Waiting

Kept: TypeAlias = tuple[Lock, torch.Tensor, torch.Tensor | None]
"""(lock, slots, state): a lock on a request's first tokens in the tree, the tokens' slots, and the slot
of the recurrent state after them."""


@dataclass(slots=True, eq=False)
class _Running:
    """A request that SGLang's scheduler runs, from its admission until it finishes or is retracted."""

    namespace: str
    prompt: PromptItems
    shared: int
    """Number of the request's first tokens whose KV another request had computed before."""
    backed_up: int = 0
    """Number of the request's first tokens that were already passed to a backup."""


@dataclass(slots=True)
class RunningRequests:
    """The running requests whose KV may be cached, by SGLang's request id."""

    backups: PendingTreeBackups
    slots: AttentionSlots
    write_policy: WritePolicy
    names: ItemNames
    _known: dict[Handle, _Running] = field(default_factory=dict[Handle, _Running])
    _saved_by: dict[Handle, str] = field(default_factory=dict[Handle, str])
    """Maps a retracted request to the name of its backup, until the request is waiting again."""

    def __contains__(self, handle: Handle) -> bool:
        """Return whether a request runs and may be backed up."""
        return handle in self._known

    def admitted(self, handle: Handle, waiting: Waiting) -> None:
        """Record that a waiting request was admitted to the next batch."""
        self._known[handle] = _Running(waiting.namespace, waiting.prompt, waiting.prefix)

    def computed(
        self, request: SglangRequest, tree_tokens: int, keep: Callable[[int], Kept]
    ) -> None:
        """Back up a request's computed tokens; the first `tree_tokens` of them are in SGLang's tree.

        `keep(n)` locks the request's first n tokens in the tree, or fewer.
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
        """Back up a request's computed tokens before SGLang frees the device slots in its `row`.

        After this call, SGLang may overwrite the slots on this rank.
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
        """Return the name of the backup for which a retracted request must wait; None if there is none.

        The name is then forgotten, so a second call returns None.
        """
        return self._saved_by.pop(handle, None)

    def left(self, handle: Handle) -> None:
        """Record that a request no longer runs, because it finished or was retracted."""
        self._known.pop(handle, None)

    def ended(self, handle: Handle) -> None:
        """Forget a request that was aborted and will not run again."""
        self._known.pop(handle, None)
        self._saved_by.pop(handle, None)

    def forget_all(self) -> None:
        """Stop backing up all current requests, because other requests must not match their KV."""
        self._known.clear()
        self._saved_by.clear()


def token_bytes(tokens: "array[int]", count: int, prompt: PromptItems = TEXT_ALONE) -> bytes:
    """Return the page-key ids of a request's first `count` tokens, as bytes.

    `prompt` has the ids up to the prompt's last multimodal placeholder.
    """
    return prompt.ids(np.frombuffer(tokens, dtype=np.int64)[:count])
