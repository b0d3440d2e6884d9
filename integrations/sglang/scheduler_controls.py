"""Calls that SGLang's hooks and endpoints make to Lockstep, besides SGLang's radix-cache methods."""

import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeAlias

from ...errors import ConfigError, UsageError
from ...ranks.group.host_cache import HostCache
from ...ranks.protocol.config import WritePolicy
from ...storage_backends.uri import parse_uri, without_secrets
from .engine.contract import ForwardBatch
from .engine.sglang_settings import store_to_attach

log = logging.getLogger(__name__)

Facts: TypeAlias = tuple[str | int | list[list[str | int]], ...]
"""Description of a batch for the state digest; two ranks with different descriptions have diverged."""

COMPARE_S = 5.0
"""Maximum seconds that a rank whose batch failed waits to compare the batch with the other ranks; the
other ranks may be blocked."""

VERDICT_S = 1e-6
"""Maximum seconds that a step waits for I/O if only its verdict is needed; practically 0."""


class SchedulerControls:
    """Lockstep's controls on one rank. SGLang's scheduler makes the same calls on every rank."""

    def __init__(
        self,
        host: HostCache,
        *,
        compare_batches: bool,
        write_policy: str = WritePolicy.WRITE_THROUGH,
    ) -> None:
        self._host = host
        self._write_policy = str(write_policy)
        self._compare_batches = compare_batches
        self._batch: Facts = ()
        store = host.config.store
        self.storage_scheme = "none" if store is None else parse_uri(store).scheme
        """URI scheme of the attached store, or `none`; SGLang reports it in `cached_tokens_details`."""

    @property
    def agreed_s(self) -> float:
        """The time in seconds on which all ranks have agreed; constant within a step."""
        return self._host.inspection.agreed_ms / 1000

    def batch_is_next(self, batch: ForwardBatch) -> None:
        """Add the next batch to the state digest, so that an error names ranks whose batches differ.

        With `compare_batches`, ranks compare their digests before any of them computes the batch.
        Without it, ranks compare their digests in the round of the next iteration.
        """
        self._batch = batch_facts(batch, each=self._compare_batches)
        self._host.digest_facts("batch", *self._batch)
        if self._compare_batches:
            self.compare_now()

    def compare_now(self) -> None:
        """Run one round and wait for its verdict; raise an error if the ranks have diverged."""
        self._host.step(idle_s=VERDICT_S)

    def batch_failed(self) -> None:
        """Log that this rank's batch failed, and whether the other ranks had the same batch."""
        rank = self._host.rank
        log.error("rank %d failed in the batch %s", rank, self._batch)
        found = self._host.compare(COMPARE_S)
        log.error("rank %d: %s", rank, found or "no difference between the ranks so far")

    def attach(
        self,
        storage_backend: str,
        storage_backend_extra_config_json: str | None = None,
        served_model_name: str | None = None,
        hicache_storage_prefetch_policy: str | None = None,
        hicache_write_policy: str | None = None,
    ) -> tuple[bool, str]:
        """Attach a store; return (whether every rank attached it, message).

        After a failure, the message has the reason.
        """
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
        refusal = self._decide(lambda: self._host.attach_store(uri))
        if refusal:
            return False, refusal
        self.storage_scheme = parse_uri(uri).scheme
        return True, f"attached {without_secrets(uri)}"

    def detach(self) -> tuple[bool, str]:
        """Detach the store; return (whether every rank detached it, message).

        After a failure, the message has the reason.
        """
        refusal = self._decide(self._host.detach_store)
        if refusal:
            return False, refusal
        self.storage_scheme = "none"
        return True, ""

    def _decide(self, propose: "Callable[[], Future[None]]") -> str:
        """Run rounds until all ranks have accepted or refused a proposal.

        Return the reason for a refusal; "" if the proposal was accepted.
        """
        try:
            proposal = propose()
        except (ConfigError, UsageError) as error:
            return str(error)
        if not self._host.run_until_decided(proposal):
            return "the ranks did not decide in time"
        refusal = proposal.exception()
        return "" if refusal is None else str(refusal)


def batch_facts(batch: ForwardBatch, *, each: bool) -> Facts:
    """Return the batch's forward mode and a description of its requests.

    - For a prefill: each request's id, number of cached tokens, and position after its last token
      in this batch.
    - For other modes with `each`: each request's id and output length.
    - For other modes without `each`: only the number of requests, because a batch changes little
      between passes.
    """
    mode, parts = str(batch.forward_mode.name), list[list[str | int]]()
    if batch.forward_mode.is_extend():
        parts += [[each.rid, each.prefix_len, each.extend_end or 0] for each in batch.reqs]
    elif each:
        parts += [[each.rid, len(each.output_ids)] for each in batch.reqs]
    else:
        return mode, len(batch.reqs)
    return mode, parts
