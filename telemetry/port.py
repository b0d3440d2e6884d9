"""HTTP port from which Prometheus, `lockstep top` and other clients scrape one rank's metrics.

The port counts nothing itself: a scrape reads the cache's existing counters, in a separate thread.
"""

import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import accumulate
from threading import Thread
from typing import TYPE_CHECKING, Any, Final, cast
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from ..errors import ConfigError
from ..ranks.group.member.cache_stats import CacheStats
from ..ranks.group.member.group_rank import GroupRank
from ..storage_backends.latencies import BOUNDS_S, Histogram
from .families import PREFIX, Family, Labels, Number, Type, ranked_samples

if TYPE_CHECKING:
    from wsgiref.types import WSGIApplication

    from prometheus_client.metrics_core import Metric

LOOPBACK: Final = "127.0.0.1"
PORT_MAX: Final = 65535
MISSING: Final = "metrics need the package prometheus_client: pip install 'lockstep-kv[metrics]'"


class CacheCollector:
    """Collector that makes a `prometheus_client` registry read one cache at each scrape.

    `registry.register(CacheCollector(cache.stats))` adds Lockstep's metrics to an engine's registry.
    """

    def __init__(self, stats: Callable[[], CacheStats]) -> None:
        """Read metrics from `stats`, which must be thread-safe, like `Cache.stats`."""
        self._stats = stats

    def collect(self) -> "Iterator[Metric]":
        """Yield all metrics with the cache's current counts."""
        for family, samples in ranked_samples(self._stats()):
            yield _exposed(family, samples)

    def describe(self) -> "list[Metric]":
        """Return nothing, so that registering this collector does not read the cache."""
        return []


def _exposed(family: Family[Any], samples: Iterable[tuple[Labels, Number]]) -> "Metric":
    # Import lazily, because only processes that expose metrics need `prometheus_client`.
    from prometheus_client import core  # noqa: PLC0415

    makers: dict[Type, Any] = {
        Type.COUNTER: core.CounterMetricFamily,
        Type.GAUGE: core.GaugeMetricFamily,
        Type.HISTOGRAM: core.HistogramMetricFamily,
    }
    name, labels = f"{PREFIX}{family.name}", ("rank", *family.labels)
    metric = makers[family.type](name, family.meaning, labels=labels)
    for values, value in samples:
        numbers = (_buckets(value), value.sum_s) if isinstance(value, Histogram) else (value,)
        metric.add_metric(values, *numbers)
    exposed: Metric = metric
    return exposed


def _buckets(took: Histogram) -> list[tuple[str, int]]:
    bounds = [*(f"{bound:.6g}" for bound in BOUNDS_S), "+Inf"]
    return list(zip(bounds, accumulate(took.counts), strict=True))


SCRAPE_S: Final = 5.0
"""Seconds after which an idle connection is closed, because each open connection occupies a thread."""


class _Handler(WSGIRequestHandler):
    """Serves one connection, and closes it if the client sends no request for `SCRAPE_S` seconds."""

    timeout = SCRAPE_S

    def handle(self) -> None:
        """Handle the connection; ignore timeouts and lost connections."""
        with suppress(TimeoutError, ConnectionError):
            super().handle()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - as it is called.
        """Log nothing, because scrapes are frequent."""


class MetricsPort:
    """Serves one rank's metrics over HTTP until closed."""

    def __init__(self, server: WSGIServer, thread: Thread) -> None:
        self._server = server
        self._thread = thread

    @property
    def port(self) -> int:
        """The port number that the server listens on."""
        port: int = self._server.server_port
        return port

    def close(self) -> None:
        """Stop the server and wait for its thread."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def watch(cache: GroupRank, port: int | None) -> None:
    """Serve a rank's metrics on the loopback address until its cache closes.

    The port is `port` plus the rank's number. If `port` is None, nothing is served. If the server
    cannot listen on the port, the cache is abandoned and `ConfigError` is raised.
    """
    if port is None:
        return
    try:
        if port + cache.world_size - 1 > PORT_MAX:
            raise ConfigError(
                f"metrics_port is {port}, must be {PORT_MAX - cache.world_size + 1} or less,"
                f" because the {cache.world_size} ranks use consecutive ports"
            )
        # Do not copy the times of single steps, because no metric uses them.
        served = serve_metrics(partial(cache.stats, rounds=0), port + cache.rank)
    except ConfigError:
        cache.abandon()
        raise
    cache.at_close(served.close)


def serve_metrics(
    stats: Callable[[], CacheStats], port: int, *, address: str = LOOPBACK
) -> MetricsPort:
    """Serve a cache's metrics at `http://address:port/metrics`; port 0 selects a free port.

    `stats` is the `stats` method of the cache. The default address is reachable from this machine only,
    and there is no password. Raises `ConfigError` if the port is unavailable or the package
    `prometheus_client` is missing.
    """
    try:
        from prometheus_client import (  # noqa: PLC0415
            CollectorRegistry,
            make_wsgi_app,  # pyright: ignore[reportUnknownVariableType] - what it returns has no type.
        )
        from prometheus_client.exposition import ThreadingWSGIServer  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(MISSING) from error
    registry = CollectorRegistry(auto_describe=False)
    registry.register(CacheCollector(stats))
    app = cast("WSGIApplication", make_wsgi_app(registry))
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    kind = type("_Server", (ThreadingWSGIServer,), {"address_family": family})
    try:
        server: WSGIServer = make_server(address, port, app, kind, _Handler)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"metrics cannot be served at {address}:{port}: {why}; choose another port"
        ) from error
    thread = Thread(target=server.serve_forever, name="lockstep-metrics", daemon=True)
    thread.start()
    return MetricsPort(server, thread)
