"""Findings of `lockstep top`: problems that a group's metrics show, with a remedy for each.

All functions are pure; their argument is a window, the difference of two metric readings. Findings are
sorted by severity, most severe first.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice
from typing import Final

from .group_sample import GroupSample, label_of
from .window import Window

MISSES: Final = {
    "never_seen": "never seen",
    "evicted": "evicted",
    "lost": "lost in storage",
    "other_key": "other key",
}
"""Names that the screen shows for the causes of misses, by cause."""
ADMISSIONS_MIN: Final = 8
"""Minimum number of requests in a window for a judgement about new namespaces."""
SALTED_SHARE: Final = 0.5
"""If more than this share of requests has a new namespace, each request seems to have its own salt."""
SLOW_READ_S: Final = 0.25
"""A read that takes this many seconds or more is slow, because computing the page again takes less."""
TURNOVER_S: Final = 600.0
"""If all host pages are evicted within this many seconds, conversations miss at their next turn."""
SKEW: Final = 4.0
"""The rank that waits least in rounds is slow if another waits more than this many times as long."""
SKEW_S: Final = 0.001
PEER: Final = "peer"
SILENT_NAMED: Final = 4
"""Maximum number of silent addresses that one finding lists."""


class Weight(IntEnum):
    """Severity of a finding; a lower number is more severe."""

    BROKEN = 0
    """Severity: nothing is cached, or the group has ended or soon will end."""
    COSTS_HITS = 1
    SLOWS = 2
    NORMAL = 3


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem of the group and its remedy."""

    weight: Weight
    what: str
    remedy: str


def findings(window: Window) -> list[Finding]:
    """Return a window's findings, most severe first; there is always at least one."""
    found = [finding for look_for in _ALL for finding in look_for(window)]
    if not any(each.weight <= Weight.COSTS_HITS for each in found):
        found += _nothing_wrong(window)
    return sorted(found, key=lambda each: each.weight)


def _ended(window: Window) -> Iterator[Finding]:
    for rank, numbers in window.now.ranks.items():
        for key, value in numbers.items():
            if key[0] == "lockstep_group_up" and not value:
                error = label_of(key, "ended_by")
                yield Finding(
                    Weight.BROKEN,
                    f"the group has ended; rank {rank} reports: {error}",
                    "see its log for the whole message; the engine must open the cache again",
                )
                return


def silence_of(seen: GroupSample) -> str:
    """Return text with the addresses at which no rank answers, and how long ago each last answered."""
    addresses: list[str] = []
    for address, other in islice(seen.silent.items(), SILENT_NAMED):
        last_answer_s = seen.last_answer_s.get(address)
        last_answer = (
            "" if last_answer_s is None else f"last answer {_time(seen.at_s - last_answer_s)} ago"
        )
        why = ", ".join(filter(None, (other, last_answer)))
        addresses.append(f"{address} ({why})" if why else address)
    others = len(seen.silent) - len(addresses)
    return f"no rank answers at {', '.join(addresses)}" + (
        f" and {others:,} others" if others else ""
    )


def _silent(window: Window) -> Iterator[Finding]:
    if window.now.silent:
        yield Finding(
            Weight.BROKEN if not window.now.ranks else Weight.SLOWS,
            silence_of(window.now),
            "the rank has ended or hangs (see the ranks' logs), or it uses another port: give each"
            " rank's address as HOST:PORT",
        )


def _no_store(window: Window) -> Iterator[Finding]:
    hanging = window.is_at("operations_quarantined")
    if hanging:
        yield Finding(
            Weight.BROKEN,
            f"{hanging:.0f} operations hang; their pages are quarantined",
            "check the store and the device: their calls do not return",
        )
    if window.is_at("store_state", state="lost"):
        yield Finding(
            Weight.COSTS_HITS,
            "the group has lost its store: calls to it did not return",
            "attach it again once it answers, or detach it to continue without it (`lockstep ctl`)",
        )


def _unwritten(window: Window) -> Iterator[Finding]:
    ended = window.by("operations_total", "outcome", kind="persist")
    failed, done = (ended.get(each, 0.0) for each in ("failed", "complete"))
    pages = window.is_at("unwritten_pages", cause="store_failed")
    # Also report pages that are still unwritten. Their writes are retried up to 30 s apart, so a
    # short window need not contain a failed write.
    if failed or (pages and not done):
        writes = f"{failed:,.0f} of {failed + done:,.0f} writes" if failed else "writes"
        yield Finding(
            Weight.COSTS_HITS,
            f"{writes} to the store failed; {pages:,.0f} pages wait for a retry",
            "see the ranks' logs for the reason, such as a full disk or missing permission; test the"
            " store with `lockstep doctor --store URI`",
        )


def _source(window: Window) -> str:
    """Return text that names the source of the group's prefetches: the store, peers, or both."""
    if PEER not in window.values_of("storage_calls_in_flight", "store"):
        return "the store"
    return "peers" if window.is_at("store_state", state="none") else "the store or peers"


def _lacking(window: Window) -> Iterator[Finding]:
    missed = window.by("missed_pages_total", "reason")
    pages = missed.get("one_rank_lacks_it", 0.0)
    if not pages:
        return
    ranks = window.by("lacking_total", "lacking_rank")
    worst = max(ranks, key=lambda rank: ranks[rank], default="")
    who = f"rank {worst}" if worst else "one rank"
    yield Finding(
        Weight.COSTS_HITS,
        f"{who} lacks pages in {_source(window)} that the other ranks have: {pages:,.0f} pages were"
        " computed again",
        f"check the store of {who}: objects were removed, or its path is wrong; pages that are computed"
        " again are written again",
    )


def _unreadable(window: Window) -> Iterator[Finding]:
    corrupt = window.grew_by_rank("corrupt_pages_total")
    if any(corrupt.values()):
        by_rank = ", ".join(f"rank {rank} {pages:,.0f}" for rank, pages in corrupt.items() if pages)
        yield Finding(
            Weight.COSTS_HITS,
            f"pages in {_source(window)} were corrupt: {by_rank}",
            "none of them was used; `lockstep store verify URI` names the objects",
        )
    elif (pages := _unread(window)) and not window.grew_on_every_rank("storage_late_calls_total"):
        yield Finding(
            Weight.COSTS_HITS,
            f"{pages:,.0f} pages could not be read from {_source(window)}",
            "see the ranks' logs for the reason; test the store with `lockstep doctor --store URI`",
        )


def _unread(window: Window) -> float:
    return window.by("missed_pages_total", "reason").get("unreadable", 0.0)


def _late(window: Window) -> Iterator[Finding]:
    late = window.grew_on_every_rank("storage_late_calls_total")
    pages = window.by("missed_pages_total", "reason").get("late", 0.0)
    if late:
        # After a timed-out call, the metrics count its pages as unreadable and not as late. Include the
        # unreadable pages in the count.
        pages += _unread(window)
    took = window.percentile("storage_call_seconds", 0.5, call="read")
    looked = window.percentile("storage_call_seconds", 0.5, call="exists")
    slow = max(took or 0.0, looked or 0.0)
    if not (pages or late) and slow < SLOW_READ_S:
        return
    how = f"half of the reads or lookups take {_time(slow)} or more"
    if slow < SLOW_READ_S:
        how = f"{late:,.0f} calls timed out" if late else "pages arrived too late"
    source = _source(window)
    lost = f"; {pages:,.0f} pages were computed instead" if pages else ""
    yield Finding(
        Weight.COSTS_HITS,
        f"{source} {'is' if source == 'the store' else 'are'} slow: {how}{lost}",
        "check it and the network (`lockstep doctor --store URI` measures a store), or change how long"
        " requests wait for it (stop policy)",
    )


def _quota(window: Window) -> Iterator[Finding]:
    left = sum(window.by("removed_pages_total", "tier", cause="limit").values())
    if left:
        yield Finding(
            Weight.COSTS_HITS,
            f"{left:,.0f} pages were evicted by their namespace's limit: a tenant's quota or TTL",
            "`lockstep ctl list SOCKET` shows namespaces and limits; raise the limit for more hits"
            " (`lockstep ctl limit`, or `CacheConfig.limits`)",
        )


def _salts(window: Window) -> Iterator[Finding]:
    begun, admissions = window.grew("namespaces_begun_total"), window.grew("admissions_total")
    if admissions >= ADMISSIONS_MIN and begun >= SALTED_SHARE * admissions:
        yield Finding(
            Weight.COSTS_HITS,
            f"{begun:,.0f} namespaces were new for {admissions:,.0f} requests: salts are not reused, so"
            " no request hits the pages of another",
            "use one salt per tenant, not per request; a salt is part of every page's key",
        )


def _host_full(window: Window) -> Iterator[Finding]:
    evicted = window.grew("removed_pages_total", tier="host", cause="room")
    no_room = window.by("missed_pages_total", "reason").get("no_room", 0.0)
    pages = window.is_at("pool_pages", tier="host", pool="kv")
    turnover_s = pages * window.seconds / evicted if evicted and window.seconds else 0.0
    times = f" every {_time(turnover_s)}" if turnover_s else ""
    is_short = 0 < turnover_s < TURNOVER_S
    if not (no_room or is_short):
        return
    has_store = window.is_at("store_state", state="attached")
    where = "are read from the store again" if has_store else "are computed again"
    waits = f"; prefetches had no room for {no_room:,.0f} pages" if no_room else ""
    yield Finding(
        Weight.COSTS_HITS,
        f"host memory is too small: all of its {pages:,.0f} pages are replaced{times}, and evicted"
        f" pages {where}{waits}",
        "give it more (host_pages, --host-pages); `lockstep plan` predicts the hits",
    )


def _slow_rank(window: Window) -> Iterator[Finding]:
    rounds = window.grew("rounds_total")
    waits = window.waits()
    if len(waits) < 2 or not rounds:
        return
    slowest = min(waits, key=lambda rank: waits[rank])
    others = max(waits.values())
    if others > SKEW * waits[slowest] and others > SKEW_S * rounds:
        yield Finding(
            Weight.SLOWS,
            f"rank {slowest} is slow: another rank waits {_time(others / rounds)} for it in each round",
            "check that rank's CPU, its device, and other programs on its host",
        )


def _nothing_wrong(window: Window) -> Iterator[Finding]:
    requested = window.grew("asked_tokens_total")
    if not requested:
        yield Finding(Weight.NORMAL, "no request was admitted", "no action needed")
        return
    missed = {each: window.grew("missed_tokens_total", cause=each) for each in MISSES}
    if not any(missed.values()):
        what = "no problem in the metrics: all tokens requested were cached"
        yield Finding(Weight.NORMAL, what, "no action needed")
        return
    if missed["evicted"]:
        remedy = "`lockstep plan TRACE` predicts the hits of a larger cache"
    elif window.is_at("store_state", state="attached"):
        remedy = (
            "if the store should have these pages, check the start of the ranks' logs for a different"
            " page size, and `lockstep store ls URI` for its models and weights"
        )
    else:
        remedy = "attach a store to keep pages from earlier runs and other engines"
    causes = ", ".join(f"{MISSES[each]} {n / requested:.0%}" for each, n in missed.items() if n)
    yield Finding(
        Weight.NORMAL,
        f"no problem in the metrics: {sum(missed.values()) / requested:.0%} of the tokens requested"
        f" were in no tier ({causes})",
        remedy,
    )


def _time(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 120 else f"{seconds / 60:.3g} min"


_ALL: Final[tuple[Callable[[Window], Iterator[Finding]], ...]] = (
    _ended,
    _silent,
    _no_store,
    _unwritten,
    # Report causes first: a slow store or a corrupt page is often the reason that one rank lacks pages
    # that the other ranks have.
    _late,
    _unreadable,
    _lacking,
    _quota,
    _salts,
    _host_full,
    _slow_rank,
)
