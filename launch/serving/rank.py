"""A rank of a group that serves, whatever launched it.

It joins its group, opens its inbox, its cache and its sender, lets the group be listed, and serves what
comes until it is told that no more does. What it has counted is left in the store where it met the
others.
"""

import logging
from collections.abc import Generator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from ...errors import ConfigError
from ...ranks.agreed_pools import namespace_of
from ...ranks.cache import Cache
from ...ranks.disaggregation.arrivals import Arrivals
from ...ranks.disaggregation.control import Control, encode
from ...ranks.disaggregation.departures import Departures, Send
from ...ranks.disaggregation.early_loads import EarlyLoads
from ...ranks.disaggregation.groups.directory import Registration
from ...ranks.disaggregation.groups.router import Role
from ...ranks.disaggregation.manifest import HandoffTerms
from ...ranks.disaggregation.messages.inbox import InboxSettings, open_inbox
from ...ranks.disaggregation.messages.sender import MessageSender, SenderSettings
from ...ranks.disaggregation.teller import Teller
from ...ranks.opening import connected
from ...ranks.replica.notices import Notice
from ...small_engine.decode_scheduler import DecodeScheduler
from ...small_engine.group_scheduler import GroupScheduler
from ...small_engine.prefill_scheduler import PrefillScheduler
from ...telemetry.kept_events import KeptEvents
from ..environment import RankEnvironment, prepare_for_mooncake
from ..handing_in import Run
from ..meeting import JOIN_TIMEOUT_S, LOOPBACK, joined
from ..report import RankResult, make_report
from ..reports.samples import Sampler
from ..worker import Watch, device_of, limits_of
from .directories import open_directory
from .membership import Membership
from .result import GroupResult, hand_in
from .settings import GroupSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...coordinator.collective import Collective

_TELL_TIMEOUT_S = 10.0
"""How long those who follow a group may take to hear what it has counted."""

log = logging.getLogger("lockstep")


def run_group_rank(
    settings: GroupSettings,
    environment: RankEnvironment,
    store: Store,
    *,
    watch: Watch,
    host: str = LOOPBACK,
) -> GroupResult | None:
    """Serve on this rank until the group is told that no more requests come.

    Returns the group's result on rank 0, which also leaves it in `store`, where the ranks meet, and
    tells it to those who follow the group. Others reach this rank at `host`.

    Raises `Interrupted` once `watch.stopped` has said so, `ConfigError` on every rank alike for what
    cannot work, and `GroupError` if the group cannot go on.
    """
    result: GroupResult | None = None
    prepare_for_mooncake()
    torch.set_num_threads(1)
    timeout_s = settings.replay.round_timeout_s
    with joined(environment, store, timeout_s=timeout_s) as group:
        watch.on_joined()
        config = settings.cache_config(host)
        collective = connected(config, group)
        with _serving(settings, environment, collective, host, watch) as serving:
            watch.on_open()
            own = serving.run.to_its_end()
            results = [RankResult.unpack(e) for e in collective.gather(own.pack(), JOIN_TIMEOUT_S)]
            if environment.rank == 0:
                report = make_report(settings.replay, results)
                result = GroupResult(report=report, **serving.outcomes())
                kept = [each.timeline for each in results if each.timeline is not None]
                hand_in(store, result, kept)
                serving.tell(result)
            serving.cache.close(flush=False)
        # The rounds are over; nobody takes the store away while another rank still leaves.
        dist.barrier()
    return result


@dataclass(frozen=True, slots=True)
class _Serving:
    """What one rank serves with."""

    cache: Cache
    handovers: Departures | Arrivals
    run: Run
    teller: Teller | None

    def tell(self, result: GroupResult) -> None:
        """Tell those who follow the group what it has counted."""
        if self.teller is not None:
            self.teller.counted(result.pack(), _TELL_TIMEOUT_S)

    def outcomes(self) -> dict[str, dict[str, int]]:
        """Return how requests came and left, by name."""
        arrived = self.handovers if isinstance(self.handovers, Arrivals) else None
        left = self.handovers if isinstance(self.handovers, Departures) else None
        return {
            "handoffs": {} if arrived is None else _by_name(arrived.outcomes),
            "manifests_refused": {} if arrived is None else _by_name(arrived.refusals),
            "departures": {} if left is None else _by_name(left.outcomes),
        }


def post(sender: MessageSender, to: str, data: bytes, deadline_s: float) -> "Future[int]":
    """Send a message to an address that came with another, which must end no rank whatever it is."""
    try:
        return sender.send(to, data, deadline_s=deadline_s)
    except ConfigError as error:
        log.warning("nothing is sent to %r: %s", to, error)
        unsent = Future[int]()
        unsent.set_exception(error)
        return unsent


@contextmanager
def _serving(
    settings: GroupSettings,
    environment: RankEnvironment,
    collective: "Collective",
    host: str,
    watch: Watch,
) -> Generator[_Serving]:
    """Open all that a rank serves with, and close it, in peace or not."""
    config, secret = settings.cache_config(host), settings.secret.encode()
    leads = environment.rank == 0
    tellers: list[Teller] = []

    def happened(notices: "Sequence[Notice]") -> None:
        for each in tellers:
            each.happened(notices)

    def send(to: str, message: Control) -> None:
        if leads:
            post(sender, to, encode(message), settings.patience_s)

    with ExitStack() as opened:
        address = InboxSettings(address=f"{host}:0", secret=secret)
        inbox = open_inbox(address, collective, JOIN_TIMEOUT_S)
        opened.callback(inbox.close)
        sender = MessageSender(SenderSettings(secret=secret))
        opened.callback(sender.close)
        device = device_of(settings.replay, environment)
        listener = happened if leads else None
        events = None if settings.replay.timeline is None else KeptEvents()
        cache = Cache.open(
            config,
            collective,
            device=device,
            inbox=inbox,
            listener=listener,
            timeline=None if events is None else events.note,
        )
        # After an error or an interruption nobody waits for a round any more.
        opened.callback(cache.abandon)
        terms = HandoffTerms.of(namespace_of(config))
        if leads:
            registration = Registration(
                name=settings.name,
                role=Role(settings.role),
                addresses={"messages": inbox.address, "pages": cache.serving_uri},
                tp_size=environment.world_size,
                fingerprint=terms.layout_fingerprint,
            )
            membership = _listed(settings, registration, cache, tellers)
            opened.callback(membership.close)
            teller = Teller(
                settings.name,
                membership.life,
                config.layout.page_tokens,
                lambda to, data: post(sender, to, data, settings.patience_s),
            )
            tellers.append(teller)
        told = tellers[0] if tellers else None
        sampler = Sampler(cache, watch.stopped) if leads else None
        if sampler is not None:
            watch = replace(watch, stopped=sampler.look)
        handovers, scheduler = _scheduled(settings, cache, terms, send, told=told, watch=watch)
        yield _Serving(cache, handovers, Run(cache, scheduler, sampler, events), told)


def _scheduled(
    settings: GroupSettings,
    cache: Cache,
    terms: HandoffTerms,
    send: Send,
    *,
    told: Teller | None,
    watch: Watch,
) -> tuple[Departures | Arrivals, GroupScheduler]:
    """Return what the group's role makes of requests, and what drives it."""
    limits = limits_of(settings.replay, token_us=settings.token_us)
    patience_s, stopped = settings.patience_s, watch.stopped
    if settings.role == Role.PREFILL:
        departures = Departures(
            cache,
            terms,
            send,
            directly=settings.directly,
            ttl_s=settings.ttl_s,
            patience_s=patience_s,
        )
        return departures, PrefillScheduler(cache, departures, limits, teller=told, stopped=stopped)
    arrivals = Arrivals(cache, terms, send, patience_s=patience_s, early=EarlyLoads(cache))
    return arrivals, DecodeScheduler(cache, arrivals, limits, teller=told, stopped=stopped)


def _listed(
    settings: GroupSettings, registration: Registration, cache: Cache, tellers: list[Teller]
) -> Membership:
    def on_new_life(life: int) -> None:
        for each in tellers:
            each.begin_life(life)

    return Membership(
        open_directory(settings.directory),
        registration,
        settings.lease_s,
        steps=lambda: cache.inspection.rounds,
        on_new_life=on_new_life,
    )


def _by_name(counts: Mapping[Any, int]) -> dict[str, int]:
    return {str(name): count for name, count in counts.items()}
