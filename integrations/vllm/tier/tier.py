"""The tier that vLLM makes: `SecondaryTierManager` over one of Lockstep's stores.

Every method runs in the thread of vLLM's scheduler and returns at once; the store has a thread of its
own. Nothing that goes wrong in a store is raised here: a chunk that is not there, is damaged or comes
late has not been loaded, and is computed; one that is not written stays in host memory alone.
"""

import logging
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar

from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import (
    canonical_format_id,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from ....storage_backends.base import ReadOutcome, StorageBackend
from ....storage_backends.complaints import Trouble
from ...blocking_store import BlockingStore
from . import metrics
from .identity import identity_of
from .lookups import Lookups
from .names import ChunkNames, chunk_names
from .quota import NamespaceQuota
from .settings import OnReset, TierSettings, parse
from .transfers import Ended, Limits, Transfers

_LOST = (ReadOutcome.MISSING, ReadOutcome.CORRUPT)

log = logging.getLogger("vllm.lockstep")
"""Below vLLM's own logger, which is the only one for which vLLM prints what is no warning."""


class LockstepTier(SecondaryTierManager):
    """One of Lockstep's stores below vLLM's host memory; see `lockstep.integrations.vllm.tier`."""

    medium: ClassVar[Medium | None] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        **settings: Any,
    ) -> None:
        """Open the store. Raises `ConfigError` for a setting that is wrong, or what keeps it shut."""
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self._settings = parse(settings)
        where = self._settings.locality
        self.locality = None if where is None else Locality(where)
        self._events = self._new_events(offloading_spec)
        self._is_left = False
        self._transfers = Transfers(primary_kv_view, _limits(self._settings))
        self._names = self._named(offloading_spec)
        self._quota: NamespaceQuota | None = None
        self._store = BlockingStore(self._settings.store, "vLLM", self._with_quota)
        self._lookups = Lookups(
            self._ask,
            self._settings.lookup_timeout_s,
            trouble=lambda what: self._complain("looked up", what),
        )
        self._troubles = {verb: Trouble() for verb in ("looked up", "read", "written")}
        self._stats = OffloadingConnectorStats()
        self._open()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        found = not self._is_left and self._lookups.find(key, req_context.req_id)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._begin(job_metadata, reads=False)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._begin(job_metadata, reads=True)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        return [self._result(each) for each in self._transfers.ended()]

    def take_events(self) -> Iterable[OffloadingEvent]:
        events, self._events = self._events, None if self._events is None else []
        return events or ()

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._lookups.finished(req_context.req_id)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._lookups.flush()

    def drain_jobs(self) -> None:
        """Wait until every job is over, which takes no longer than its deadline.

        vLLM calls it where its host memory is reset, and tells its tiers in no other way.
        """
        self._transfers.drain()
        if self._settings.on_reset is OnReset.LEAVE and not self._is_left:
            self._is_left = True
            self._transfers.close()
            log.warning(
                "vLLM's cache was reset, so the weights may be others: the store %s is left alone from"
                " now on, unread and unwritten. Where they are the same, give on_reset: keep",
                self._store.shown,
            )

    def shutdown(self) -> None:
        """Write out what can be written in a moment, and leave vLLM's memory. Idempotent."""
        self._transfers.drain(self._settings.close_timeout_s)
        self._transfers.close()
        self._store.close()

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        return metrics.definitions()

    def get_stats(self) -> OffloadingConnectorStats | None:
        stats, self._stats = self._stats, OffloadingConnectorStats()
        if self._quota is not None:
            metrics.hold(stats, self.tier_type, self._quota.held_bytes)
        return None if stats.is_empty() else stats

    def _open(self) -> None:
        try:
            self._store.open(
                self._transfers.memory,
                self._settings.open_timeout_s,
                close_timeout_s=self._settings.close_timeout_s,
            )
        except BaseException:
            self._transfers.close()
            raise
        self._transfers.begin_with(self._store, self._names)
        log.info(
            "Lockstep's tier %s: chunks of %d bytes go to the store %s, namespace %s, shard %s%s",
            self.tier_type,
            self._transfers.row_bytes,
            self._store.shown,
            self._names.namespace[:16],
            self._names.shard,
            "" if self._quota is None else f", at most {self._settings.quota_gib:g} GiB of them",
        )

    def _named(self, spec: OffloadingSpec) -> ChunkNames:
        config = spec.config
        form = None
        if config.canonical_layout and config.kv_cache_layout is not None:
            form = canonical_format_id(config.kv_cache_layout)
        return chunk_names(
            config,
            identity_of(self._settings, get_current_vllm_config_or_none()),
            self._settings.model or config.model.name,
            self._transfers.row_bytes,
            form,
        )

    def _with_quota(self, backend: StorageBackend) -> StorageBackend:
        if self._settings.quota_gib is None:
            return backend
        nbytes = int(self._settings.quota_gib * (1 << 30))
        self._quota = NamespaceQuota(backend, self._names.namespace, nbytes)
        return self._quota

    def _new_events(self, spec: OffloadingSpec) -> list[OffloadingEvent] | None:
        if not self._settings.enable_kv_events:
            return None
        if spec.kv_events_config.enable_kv_cache_events:
            return []
        log.warning("the tier %s tells no KV events, since vLLM publishes none", self.tier_type)
        return None

    def _ask(self, keys: Sequence[bytes], by: float) -> "Future[list[bool]]":
        names = self._names.of(keys)
        return self._store.begin(lambda backend: backend.exists(names, deadline=by))

    def _begin(self, job: TransferJob, *, reads: bool) -> None:
        rows = [int(each) for each in job.chunk_ids]
        self._transfers.begin(job.job_id, list(job.keys), rows, reads=reads)

    def _result(self, job: Ended) -> JobResult:
        verb = "read" if job.is_read else "written"
        metrics.count(self._stats, self.tier_type, job)
        self._note(verb, job)
        well, not_well = job.well(), job.not_well()
        if job.is_read:
            self._lookups.lost(not_well)
            self._tell(
                [key for key, each in zip(job.keys, job.outcomes, strict=True) if each in _LOST],
                removed=True,
            )
        else:
            self._lookups.stored(well)
            self._tell(well, removed=False)
        return JobResult(
            job_id=job.number,
            success=job.went_well,
            successful_keys=_typed(well) if job.is_read and well and not_well else None,
            transfer_time=job.took_s,
            transfer_bytes=len(well) * self._transfers.row_bytes,
        )

    def _tell(self, keys: Collection[bytes], *, removed: bool) -> None:
        if self._events is None or not keys:
            return
        self._events.append(
            OffloadingEvent(
                keys=_typed(keys),
                medium=Medium.STORAGE,
                removed=removed,
                locality=self.locality,
            )
        )

    def _note(self, verb: str, job: Ended) -> None:
        said = metrics.ailing(job)
        if said and not self._is_left:
            self._complain(verb, said)
        else:
            self._troubles[verb].went_well()

    def _complain(self, verb: str, what: str) -> None:
        if self._troubles[verb].is_to_be_said():
            log.warning(
                "chunks cannot be %s in the store %s (%s): they are computed or kept in host memory"
                " alone; look at the store",
                verb,
                self._store.shown,
                what,
            )


def _typed(keys: Iterable[bytes]) -> list[OffloadKey]:
    return [OffloadKey(key) for key in keys]


def _limits(settings: TierSettings) -> Limits:
    return Limits(
        read_s=settings.read_timeout_s,
        write_s=settings.write_timeout_s,
        in_flight_bytes=int(settings.in_flight_mib * (1 << 20)),
    )
