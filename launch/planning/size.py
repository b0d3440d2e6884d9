"""`lockstep size`: KV bytes per token by pool, tokens that fit each tier, and an advised page size.

A store has a fixed cost per object, so small objects are slow. `file://` reaches about half of the
hardware's read bandwidth with objects of 64 KiB, and most of it with 1 MiB (docs/performance.md). Large
pages have a cost, too, because only whole pages of a prefix are cached. On average half a page of each
prompt is computed again, and tokens that two prompts share after their last common page are stored
twice.
"""

from dataclasses import asdict
from math import ceil
from typing import Final, NamedTuple, TypedDict

from rich import box
from rich.console import Console
from rich.table import Table

from ...errors import ConfigError
from ...page_format.object_header import HEADER_BYTES
from ...ranks.protocol.config import PAGES_MAX
from ...ranks.protocol.orders import KV_POOL
from ...small_engine.profile import Profile
from ..cli.amounts import bytes_in_words, count
from ..cli.options import ReportFile
from ..cli.report_files import write_report
from .plan_settings import SizeSettings
from .pools import GIB, ModelPools
from .published import find_model

PAGE_SIZES: Final = (16, 32, 64, 128, 256)
OBJECT_BYTES_GOOD: Final = 1 << 20
_USUAL: Final = SizeSettings()


class PageSize(NamedTuple):
    """A candidate page size and its costs: object headers, and tokens that are computed again."""

    page_tokens: int
    object_bytes: int
    """Bytes of one full-attention page of one rank in the store, without the object's header."""
    header_share: float
    waste_tokens: int
    """Average number of tokens that each prompt computes again, because only whole pages hit."""


class PoolSize(TypedDict):
    """Size of one pool's KV per token or per state."""

    pool: str
    layers: int
    columns: str
    bytes_model: int
    """Bytes per token (or per state) on all ranks together; replicated content counts once."""
    bytes_rank: int
    """Bytes per token (or per state) on one rank."""
    kept: str
    """Text that names the tokens for which the pool keeps KV or a state."""


class TierSize(TypedDict):
    """Tokens that fit in one tier, and the GiB that the requested number of tokens needs there."""

    tier: str
    gib: float
    tokens: int
    wanted_gib: float


def size(*, settings: SizeSettings = _USUAL, report: ReportFile = None) -> None:
    """Print a model's KV size, and write the report."""
    model = find_model(settings.model, settings.dtype)
    sizes = page_sizes(model.profile, settings.tp)
    best = advised(sizes)
    page_tokens = settings.page_tokens or best.page_tokens
    if settings.tokens // page_tokens > PAGES_MAX:
        raise ConfigError(f"--tokens is {settings.tokens:g}, must be {PAGES_MAX} pages at most")
    pools = ModelPools(model.profile, settings.tp, page_tokens)
    by_pool, tiers = _pools(pools), _tiers(pools, settings)
    console = Console(highlight=False, emoji=False)
    console.print(
        f"{model.profile.model} in {settings.dtype} on {count(settings.tp, 'rank')}, pages of"
        f" {page_tokens} tokens",
        soft_wrap=True,
    )
    _print_pools(by_pool, console)
    _print_tiers(tiers, settings, console)
    _print_page_sizes(sizes, best, console)
    advice = {"page_tokens": best.page_tokens, "sizes": [each._asdict() for each in sizes]}
    found = {"settings": asdict(settings), "pools": by_pool, "tiers": tiers, "pages": advice}
    write_report(report, found)


def page_sizes(profile: Profile, tp: int) -> list[PageSize]:
    """Return each candidate page size with its cost."""
    sizes: list[PageSize] = []
    for tokens in PAGE_SIZES:
        nbytes = ModelPools(profile, tp, tokens).page_bytes[KV_POOL]
        sizes.append(PageSize(tokens, nbytes, HEADER_BYTES / (HEADER_BYTES + nbytes), tokens // 2))
    return sizes


def advised(sizes: list[PageSize]) -> PageSize:
    """Return the smallest of `sizes` whose objects are read fast; if none are, return the largest."""
    return next((each for each in sizes if each.object_bytes >= OBJECT_BYTES_GOOD), sizes[-1])


def _pools(pools: ModelPools) -> list[PoolSize]:
    """Return the bytes per token or per state of each pool."""
    window, state = pools.profile.window, pools.profile.state
    one = ModelPools(pools.profile, pools.tp, 1)
    kept = {KV_POOL: "each token"}
    if window is not None:
        kept["window"] = f"the last {window.window_tokens:,} tokens"
    if state is not None:
        kept["state"] = f"a state every {state.every(pools.page_tokens):,} tokens"
    return [
        PoolSize(
            pool=name,
            layers=layout.columns[0].layers,
            columns=", ".join(
                f"{each.name} {each.heads}x{each.elements}{' (replicated)' * each.replicated}"
                for each in layout.columns
            ),
            bytes_model=layout.shard(0, 1).page_bytes,
            bytes_rank=one.page_bytes[name],
            kept=kept[name],
        )
        for name, layout in one.layouts.items()
    ]


def _tiers(pools: ModelPools, settings: SizeSettings) -> list[TierSize]:
    unit = pools.page_tokens
    wanted = ceil(settings.tokens / unit)
    tiers = [
        TierSize(
            tier=f"{label} {tier}",
            gib=gib,
            tokens=pools.pages(gib * GIB, tier) * unit,
            wanted_gib=pools.nbytes(wanted, tier) / GIB,
        )
        for label, tier, gib in (
            ("L1", "device", settings.device_gib),
            ("L2", "host", settings.host_gib),
        )
    ]
    # Assume that the ratio of window and state pages to full-attention pages is the same in a store and
    # in host memory.
    ratio = pools.nbytes(1 << 20, "host") / (pools.page_bytes[KV_POOL] << 20)
    page = pools.stored_bytes[KV_POOL] * ratio
    tiers.append(
        TierSize(
            tier="L3 storage",
            gib=settings.storage_gib,
            tokens=int(settings.storage_gib * GIB / page) * unit,
            wanted_gib=wanted * page / GIB,
        )
    )
    return tiers


def _table(*titles: str) -> Table:
    table = Table(header_style="bold", box=box.SIMPLE, pad_edge=False)
    for title in titles:
        is_text = title in {"pool", "columns", "kept for", "tier", ""}
        table.add_column(title, justify="left" if is_text else "right", overflow="fold")
    return table


def _print_pools(by_pool: list[PoolSize], console: Console) -> None:
    table = _table("pool", "kept for", "layers", "bytes", "of a rank", "columns")
    for each in by_pool:
        table.add_row(
            each["pool"],
            each["kept"],
            str(each["layers"]),
            f"{each['bytes_model']:,}",
            f"{each['bytes_rank']:,}",
            each["columns"],
        )
    console.print(table)


def _print_tiers(tiers: list[TierSize], settings: SizeSettings, console: Console) -> None:
    table = _table("tier", "GiB", "holds tokens", f"{settings.tokens:,.0f} tokens take GiB")
    for each in tiers:
        table.add_row(
            each["tier"], f"{each['gib']:,g}", f"{each['tokens']:,}", f"{each['wanted_gib']:,.1f}"
        )
    console.print(table)
    console.print(
        "GiB of L1 and L2 are per rank; GiB of L3 are the total of all ranks.", soft_wrap=True
    )


def _print_page_sizes(sizes: list[PageSize], best: PageSize, console: Console) -> None:
    table = _table("page", "object of a rank", "header", "computed again", "")
    for each in sizes:
        table.add_row(
            str(each.page_tokens),
            bytes_in_words(each.object_bytes),
            f"{each.header_share:.2%}",
            f"{each.waste_tokens} tokens",
            "advised" if each is best else "",
        )
    console.print(table)
    if best.object_bytes >= OBJECT_BYTES_GOOD:
        why = "objects have 1 MiB or more; smaller ones suffer from a store's fixed cost per object"
    else:
        why = "no object reaches 1 MiB; smaller ones suffer from a store's fixed cost per object"
    console.print(
        f"Pages of {best.page_tokens} tokens: {why}. Larger pages waste more: on average half a page of"
        " each prompt is computed again.",
        soft_wrap=True,
    )
