"""The port at which Prometheus, `lockstep top` and whoever else scrapes one rank's metrics.

Nothing is counted for it: a scrape reads what the cache counts anyway, in a thread of its own.
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
from ..ranks.group.member.member import Member
from ..storage_backends.latencies import BOUNDS_S, Histogram
from .families import PREFIX, Family, Labels, Number, Type, ranked_samples

if TYPE_CHECKING:
    from wsgiref.types import WSGIApplication

    from prometheus_client.metrics_core import Metric

LOOPBACK: Final = "127.0.0.1"
PORT_MAX: Final = 65535
MISSING: Final = "metrics need the package prometheus_client: pip install 'lockstep-kv[metrics]'"


class CacheCollector:
    """Has a `prometheus_client` registry read one cache at each scrape.

    `registry.register(CacheCollector(cache.stats))` puts Lockstep's metrics beside an engine's own.
    """

    def __init__(self, stats: Callable[[], CacheStats]) -> None:
        """`stats` is asked from whichever thread scrapes; `Cache.stats` allows that."""
        self._stats = stats

    def collect(self) -> "Iterator[Metric]":
        """Yield all families with what the cache has counted by now."""
        for family, samples in ranked_samples(self._stats()):
            yield _exposed(family, samples)

    def describe(self) -> "list[Metric]":
        """Return nothing, so that registering a cache does not read it."""
        return []


def _exposed(family: Family[Any], samples: Iterable[tuple[Labels, Number]]) -> "Metric":
    # Only who exposes metrics needs the package.
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
"""How long a connection may be silent. Each has a thread while it lasts."""


class _Handler(WSGIRequestHandler):
    """Answers one connection, and lets go of one that does not say what it wants."""

    timeout = SCRAPE_S

    def handle(self) -> None:
        """Answer it."""
        with suppress(TimeoutError, ConnectionError):
            super().handle()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - as it is called.
        """Say nothing: scrapes are many."""


class MetricsPort:
    """Serves one rank's metrics by HTTP until it is closed."""

    def __init__(self, server: WSGIServer, thread: Thread) -> None:
        self._server = server
        self._thread = thread

    @property
    def port(self) -> int:
        """The port that it listens on."""
        port: int = self._server.server_port
        return port

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def watch(cache: Member, port: int | None) -> None:
    """Serve a rank's metrics on loopback, at its own number from `port` on, until its cache closes.

    Nothing where `port` is None. Raises as `serve_metrics` does, with the cache closed.
    """
    if port is None:
        return
    try:
        if port + cache.world_size - 1 > PORT_MAX:
            raise ConfigError(
                f"metrics_port is {port}, must be {PORT_MAX - cache.world_size + 1} or less: each of"
                f" the {cache.world_size} ranks has a port of its own from there on"
            )
        # The times of single steps are many, and no metric has them.
        served = serve_metrics(partial(cache.stats, rounds=0), port + cache.rank)
    except ConfigError:
        cache.abandon()
        raise
    cache.at_close(served.close)


def serve_metrics(
    stats: Callable[[], CacheStats], port: int, *, address: str = LOOPBACK
) -> MetricsPort:
    """Serve a cache's metrics at `http://address:port/metrics`; port 0 takes one that is free.

    `stats` is a cache's method of that name. Only this machine reaches it unless `address` says
    otherwise; there is no password. Raises `ConfigError` if the port cannot be had, or the package
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
