"""What `lockstep ctl` shows of a group, in lines."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from .cli.amounts import count, printable

_BOUNDS: Final = {
    "device_pages": "device pages",
    "host_pages": "host pages",
    "ttl_s": "s unused",
}


def list_lines(answer: Mapping[str, Any]) -> list[str]:
    """Return the lines that tell what a group keeps, the namespaces with the most first."""
    most_first = sorted(answer["namespaces"].items(), key=lambda each: -sum(each[1].values()))
    lines = _columns(
        ("namespace", "device pages", "host pages"),
        *((_name(name), each["device_pages"], each["host_pages"]) for name, each in most_first),
    )
    for each in answer["limits"]:
        bounds = [
            f"{value:g} {words}"
            for name, words in _BOUNDS.items()
            if (value := each[name]) is not None
        ]
        lines.append(f"limit of {_name(each['namespace'])}: {', '.join(bounds) or 'none'}")
    for name, each in answer["pins"].items():
        lines.append(
            f"pin {_name(name)}: {count(each['tokens'], 'token')} of {_name(each['namespace'])}"
        )
    return [*lines, f"store: {answer['store']}"]


def stats_lines(stats: Mapping[str, Any]) -> list[str]:
    """Return the lines that tell what a rank has counted; `CacheStats` has the fields."""
    replica = stats["replica"]
    asked = replica["asked_tokens"]
    hits = ", ".join(
        f"{tier} {tokens / asked:.1%}" for tier, tokens in replica["hit_tokens"].items() if asked
    )
    pools = _columns(
        ("pool", "tier", "pages", "cached", "held", "free"),
        *(
            (name, tier, use["pages"], use["cached"], use["held"], use["free"])
            for name, tiers in stats["pools"].items()
            for tier, use in tiers.items()
        ),
    )
    told = {
        "ended by": stats["ended_by"],
        "in flight": _counts(stats["in_flight"]),
        "operations": _counts(
            {
                f"{kind} {outcome}": times
                for kind, outcomes in replica["operations"].items()
                for outcome, times in outcomes.items()
            }
        ),
        "pages missed": _counts(replica["missed_pages"]),
        "pages corrupt": stats["pages_corrupt"] or "",
        "pages not written yet": _counts(stats["unwritten_pages"]),
        "pages lost unwritten": _counts(stats["left_unwritten_pages"]),
        "bytes moved": _counts(stats["bytes_moved"]),
        "calls to the store that were late": stats["storage_late"]["calls"] or "",
    }
    steps = count(stats["steps"], "step")
    who = f"rank {stats['rank']} of {stats['world_size']}"
    return [
        f"{who}: {steps}, {stats['transport']}, store {stats['store']}",
        f"{count(asked, 'prompt token')}: {hits or 'no hit'}",
        *pools,
        *(f"{what}: {said}" for what, said in told.items() if said),
    ]


def _columns(head: Sequence[str], *rows: Sequence[object]) -> list[str]:
    """Return a table: texts to the left, numbers to the right."""
    told = [[f"{each:,}" if isinstance(each, int) else str(each) for each in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(head, *told, strict=True)]
    right = [isinstance(each, int) for each in rows[0]] if rows else [False] * len(head)
    return [
        "  ".join(
            f"{each:>{width}}" if numbers else f"{each:{width}}"
            for each, width, numbers in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in (list(head), *told)
    ]


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {number:,}" for name, number in counts.items() if number)


def _name(name: str) -> str:
    return printable(repr(name))
