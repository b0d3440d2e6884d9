"""What hooks and endpoints of SGLang ask of Lockstep, beside the calls of a cache."""

import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeAlias

from ...errors import ConfigError, UsageError
from ...ranks.group.host_cache import HostCache
from ...ranks.protocol.config import WritePolicy
from ...storage_backends.uri import parse_uri, without_secrets
from .engine.contract import Batch
from .engine.settings import store_to_attach

log = logging.getLogger(__name__)

Facts: TypeAlias = tuple[str | int | list[list[str | int]], ...]
"""The facts of a batch, which are equal on every rank."""

COMPARE_S = 5.0
"""How long a rank whose batch has failed waits for the others, which may wait for it elsewhere."""

VERDICT_S = 1e-6
"""How long a step that is to end with its own verdict waits for anything else."""


class Controls:
    """The controls of one rank's cache. All calls come from SGLang's scheduler, on every rank alike."""

    def __init__(
        self, host: HostCache, *, witness: bool, write_policy: str = WritePolicy.WRITE_THROUGH
    ) -> None:
        self._host = host
        self._write_policy = str(write_policy)
        self._witness = witness
        self._batch: Facts = ()
        store = host.config.store
        self.storage_scheme = "none" if store is None else parse_uri(store).scheme
        """What SGLang is to call the store in the details of a request's cached tokens."""

    @property
    def agreed_s(self) -> float:
        """The time that all ranks have agreed on, in seconds; it stands still within a step."""
        return self._host.inspection.agreed_ms / 1000

    def batch_is_next(self, batch: Batch) -> None:
        """Enter what the next pass computes into the digest; ranks that differ are named.

        With `witness` before any rank computes it, else in the round of the next iteration.
        """
        self._batch = batch_facts(batch, each=self._witness)
        self._host.witness("batch", *self._batch)
        if self._witness:
            self.compare_now()

    def compare_now(self) -> None:
        """Run a round and wait for it: ranks that have come to differ end here, by name."""
        self._host.step(idle_s=VERDICT_S)

    def batch_failed(self) -> None:
        """Say in the log what this rank was computing, and whether the other ranks were too."""
        rank = self._host.rank
        log.error("rank %d was to compute the batch %s", rank, self._batch)
        found = self._host.compare(COMPARE_S)
        log.error("rank %d: %s", rank, found or "all ranks have done the same up to here")

    def attach(
        self,
        storage_backend: str,
        storage_backend_extra_config_json: str | None = None,
        served_model_name: str | None = None,
        hicache_storage_prefetch_policy: str | None = None,
        hicache_write_policy: str | None = None,
    ) -> tuple[bool, str]:
        """Use a store from now on; return whether that is so on every rank, and what to tell."""
        del served_model_name
        try:
            uri = store_to_attach(
                storage_backend,
                storage_backend_extra_config_json,
                {
                    "hicache_storage_prefetch_policy": (
                        hicache_storage_prefetch_policy,
                        str(self._host.config.stop_policy.rule),
                    ),
                    "hicache_write_policy": (hicache_write_policy, self._write_policy),
                },
            )
        except ConfigError as error:
            return False, str(error)
        told = self._decide(lambda: self._host.attach_store(uri))
        if told:
            return False, told
        self.storage_scheme = parse_uri(uri).scheme
        return True, f"attached {without_secrets(uri)}"

    def detach(self) -> tuple[bool, str]:
        """Use the store no more; return whether that is so on every rank, and what to tell."""
        told = self._decide(self._host.detach_store)
        if told:
            return False, told
        self.storage_scheme = "none"
        return True, ""

    def _decide(self, propose: "Callable[[], Future[None]]") -> str:
        """Run rounds until all ranks have decided; return why not, or nothing."""
        try:
            proposal = propose()
        except (ConfigError, UsageError) as error:
            return str(error)
        if not self._host.run_until_decided(proposal):
            return "the ranks have not come to a decision in time"
        refusal = proposal.exception()
        return "" if refusal is None else str(refusal)


def batch_facts(batch: Batch, *, each: bool) -> Facts:
    """Return the batch's mode, and of which requests it computes how much.

    Of a prefill the requests by name, with the tokens that are there and those that are computed. Of
    the others how many there are, and with `each` them all: they change little from pass to pass.
    """
    mode, parts = str(batch.forward_mode.name), list[list[str | int]]()
    if batch.forward_mode.is_extend():
        parts += [[each.rid, each.prefix_len, each.extend_end or 0] for each in batch.reqs]
    elif each:
        parts += [[each.rid, len(each.output_ids)] for each in batch.reqs]
    else:
        return mode, len(batch.reqs)
    return mode, parts
