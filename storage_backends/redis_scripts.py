"""Scripts on a Redis or Valkey server, with redis-py: each happens at once for everybody."""

import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Final, TypeVar

from ..errors import ConfigError, StorageError
from .uri import without_secrets_of

_TIMEOUT_S: Final = 5.0
"""How long one answer of the server may take."""
_CONNECTIONS_MAX: Final = 128
"""More than there are threads that ask; one that finds none free would fail."""

T = TypeVar("T")


class RedisScripts:
    """A connection to a server and the scripts that run there, on the same keys. Thread-safe."""

    def __init__(
        self, what: str, url: str, scripts: Mapping[str, str], keys: Sequence[str], *, repeats: bool
    ) -> None:
        """`what` is what errors call it. Where it `repeats`, a script that may have run runs again."""
        self._what = what
        self._url = url
        self._bodies = scripts
        self._keys = list(keys)
        self._repeats = repeats
        self._lock = threading.Lock()
        self._client: Any = None
        self._scripts: dict[str, Any] = {}
        self._errors: tuple[type[Exception], ...] = (OSError,)

    def open(self, first: Callable[[], T]) -> T:
        """Connect, and return what `first` asks for; raises `ConfigError` if there is no answer."""
        try:
            redis = import_module("redis")
        except ImportError as error:
            raise ConfigError(
                f"{self._what} needs redis-py; install it with: pip install 'redis>=5.0'"
            ) from error
        self._errors = (redis.RedisError, OSError)
        options: dict[str, Any] = {}
        if self._repeats:
            # What was lost with an idle connection is tried again.
            retry = import_module("redis.retry").Retry
            no_backoff = import_module("redis.backoff").NoBackoff
            options["retry"] = retry(no_backoff(), 1, supported_errors=(redis.ConnectionError,))
        try:
            self._client = redis.Redis.from_url(
                self._url,
                socket_timeout=_TIMEOUT_S,
                socket_connect_timeout=_TIMEOUT_S,
                max_connections=_CONNECTIONS_MAX,
                **options,
            )
            self._scripts = {
                name: self._client.register_script(body) for name, body in self._bodies.items()
            }
            return first()
        except (*self._errors, ValueError, TypeError, StorageError) as error:
            self.close()
            # An error of ours names it already.
            why = error.__cause__ if isinstance(error, StorageError) and error.__cause__ else error
            raise ConfigError(
                f"{self._what} cannot be used: {self._told(why)}; start the server, or give its"
                " address"
            ) from None

    def run(self, script: str, arguments: Sequence[Any] = ()) -> Any:
        """Return what a script answers."""
        with self._asking() as client:
            return self._scripts[script](keys=self._keys, args=arguments, client=client)

    def ask(self, *command: Any) -> Any:
        """Return what a command answers."""
        with self._asking() as client:
            return client.execute_command(*command)

    def close(self) -> None:
        """Disconnect. Idempotent."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    @contextmanager
    def _asking(self) -> Generator[Any]:
        """Lend the client, and turn what it raises into `StorageError`."""
        if self._client is None:
            raise StorageError(f"{self._what} is not open")
        try:
            yield self._client
        except self._errors as error:
            raise StorageError(f"{self._what} does not answer: {self._told(error)}") from error

    def _told(self, error: BaseException) -> str:
        # A password with a slash in it makes the client repeat a part of it.
        return without_secrets_of(self._url, str(error))
