"""The screen of `lockstep top`: findings first, then the metrics behind them."""

from collections.abc import Sequence
from dataclasses import replace

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..cli.amounts import bytes_in_words, count
from .findings import MISSES, PEER, Finding, Weight, findings
from .group_sample import label_of
from .window import Window

_TIERS = ("device", "host", "storage", "peer")
_WEIGHTS = {
    Weight.BROKEN: "bold red",
    Weight.COSTS_HITS: "bold yellow",
    Weight.SLOWS: "yellow",
    Weight.NORMAL: "green",
}


def screen(windows: Sequence[Window]) -> RenderableType:
    """Return the whole screen; `windows` are sorted by length, and the last covers the whole run."""
    recent = windows[0]
    return Group(
        _head(recent),
        _why(_shown_findings(windows)),
        _hits(windows),
        _pools(recent),
        Text.assemble(*_lines(recent)),
    )


def _shown_findings(windows: Sequence[Window]) -> list[Finding]:
    """Return the findings of the shortest window.

    If none of these is severe, the severe findings of the next longer window come first.
    """
    found = findings(windows[0])
    if found[0].weight <= Weight.COSTS_HITS or len(windows) == 1:
        return found
    longer = windows[1]
    earlier = [
        replace(each, what=f"{_span(longer)}: {each.what}")
        for each in findings(longer)
        if each.weight <= Weight.COSTS_HITS
    ]
    # Leave out the finding that nothing is wrong if a longer window has severe findings.
    return earlier + [each for each in found if not earlier or each.weight < Weight.NORMAL]


def _head(window: Window) -> Text:
    now = window.now
    info = next((key for key in now.any_rank if key[0] == "lockstep_info"), None)
    carried = "" if info is None else f" · rounds by {label_of(info, 'transport')}"
    version = "" if info is None else f" {label_of(info, 'version')}"
    ranks = count(max(now.world_size, len(now.ranks)), "rank")
    who = "one scheduler for" if now.has_one_scheduler else f"{len(now.ranks)} of"
    return Text(
        f"lockstep{version} · {who} {ranks} answered{carried} · {_span(window)}", style="bold"
    )


def _span(window: Window) -> str:
    if window.before is None:
        return "since opened"
    if window.seconds < 100:
        return f"last {window.seconds:.0f} s"
    return f"last {window.seconds / 60:.0f} min"


def _why(found: Sequence[Finding]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for number, each in enumerate(found):
        table.add_row("" if number else "why", Text(each.what, style=_WEIGHTS[each.weight]))
        table.add_row("", f"-> {each.remedy}")
    return table


def _hits(windows: Sequence[Window]) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 1))
    table.add_column("tokens requested")
    for window in windows:
        table.add_column(_span(window), justify="right", min_width=14)
    for tier in _TIERS:
        hits = [each.grew("hit_tokens_total", tier=tier) for each in windows]
        if tier == PEER and not any(hits):
            continue
        shares = [_share(hit, each) for hit, each in zip(hits, windows, strict=True)]
        table.add_row(f"  hit, {tier}", *shares)
    for cause, words in MISSES.items():
        shares = [_share(each.grew("missed_tokens_total", cause=cause), each) for each in windows]
        table.add_row(f"  missed, {words}", *shares)
    table.add_row("requests", *(f"{each.grew('admissions_total'):,.0f}" for each in windows))
    return table


def _share(tokens: float, window: Window) -> str:
    requested = window.grew("asked_tokens_total")
    return f"{tokens / requested:.1%}" if requested else "-"


def _pools(window: Window) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 1))
    table.add_column("pages")
    states = ("free", "evictable", "held", "own")
    for each in states:
        table.add_column(each, justify="right")
    table.add_column("stored", justify="right")
    table.add_column("evicted", justify="right")
    table.add_column("over limit", justify="right")
    for pool in window.values_of("pool_pages", "pool"):
        for tier in _TIERS[:2]:
            used = [window.is_at("pool_pages", pool=pool, tier=tier, state=each) for each in states]
            if not any(used):
                continue
            flows = [
                window.grew("stored_pages_total", tier=tier),
                window.grew("removed_pages_total", tier=tier, cause="room"),
                window.grew("removed_pages_total", tier=tier, cause="limit"),
            ]
            # The metrics of stored and removed pages are sums over all pools. Show them only once, in
            # the row of the pool `kv`.
            cells = [f"{each:,.0f}" for each in flows] if pool == "kv" else []
            table.add_row(Text(f"  {pool}, {tier}"), *(f"{each:,.0f}" for each in used), *cells)
    return table


def _lines(window: Window) -> list[str]:
    lines = [
        ("missed pages", _counts(window.by("missed_pages_total", "reason"))),
        ("in flight", _counts(_in_flight(window))),
        ("rounds", _rounds(window)),
        ("store", _store(window)),
    ]
    return [f" {name:<13}{text}\n" for name, text in lines]


def _counts(counts: dict[str, float]) -> str:
    largest_first = sorted(counts.items(), key=lambda each: -each[1])
    return ", ".join(f"{name} {number:,.0f}" for name, number in largest_first) or "none"


def _in_flight(window: Window) -> dict[str, float]:
    kinds = window.values_of("operations_in_flight", "kind")
    return {kind: n for kind in kinds if (n := window.is_at("operations_in_flight", kind=kind))}


def _rounds(window: Window) -> str:
    rounds = window.grew("rounds_total")
    if not rounds:
        return "none"
    waits = {rank: waited / rounds for rank, waited in window.waits().items()}
    half, last = (window.percentile("step_seconds", share) for share in (0.5, 0.99))
    parts = [f"{rounds:,.0f}, a step blocks the engine {_took(half)} (p99 {_took(last)})"]
    if len(waits) > 1:
        slowest = min(waits, key=lambda rank: waits[rank])
        parts.append(
            f"slowest rank {slowest}: it waits {_took(waits[slowest])} a round, others up to"
            f" {_took(max(waits.values()))}"
        )
    return "; ".join(parts)


def _store(window: Window) -> str:
    states = window.values_of("store_state", "state")
    state = next((each for each in states if window.is_at("store_state", state=each)), "unknown")
    parts = [state]
    for store in window.values_of("storage_bytes_total", "store"):
        for call in ("exists", "read", "write"):
            took = window.percentile("storage_call_seconds", 0.5, store=store, call=call)
            if took is None:
                continue
            nbytes = window.grew_on_every_rank("storage_bytes_total", store=store, call=call)
            moved = f" {bytes_in_words(int(nbytes))}," if nbytes else ""
            last = window.percentile("storage_call_seconds", 0.99, store=store, call=call)
            parts.append(f"{store} {call}{moved} p50 {_took(took)}, p99 {_took(last)}")
    waiting = window.is_at_on_every_rank("storage_calls_in_flight")
    if waiting:
        parts.append(f"{count(int(waiting), 'call')} in flight")
    return "; ".join(parts)


def _took(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds == float("inf"):
        return "over 50 s"
    return f"{seconds * 1e6:.3g} us" if seconds < 1e-3 else f"{seconds * 1e3:.4g} ms"
