"""The metrics port of a rank that was launched here."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..ranks.cache_stats import CacheStats


@contextmanager
def metrics_served(
    stats: "Callable[[], CacheStats]", port: int | None, rank: int
) -> Generator[None]:
    """Serve a rank's metrics on loopback, at its own number from `port` on; nothing for None.

    Raises `ConfigError` if that port cannot be had, or what serves it is not installed.
    """
    if port is None:
        yield
        return
    from ..telemetry.port import serve_metrics

    served = serve_metrics(stats, port + rank)
    try:
        yield
    finally:
        served.close()
