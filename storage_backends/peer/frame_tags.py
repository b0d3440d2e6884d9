"""Tags that authenticate the frames of a connection between two sides that know one secret.

A tag is a GMAC: AES-256-GCM of no plaintext, with what it covers as additional data. Each direction of
a connection has its own key, derived in the handshake, and the nonce of a tag is its number in that
direction. So a tag is right for one frame at one place in one connection: if a frame was changed, left
out, repeated, moved or sent back to its sender, a tag is wrong.

Pages are authenticated and not encrypted, because GMAC reads them where they lie, and AES-GCM, at half
the speed, would write every page into a buffer before it is sent (docs/performance.md). Without a
secret there are no tags.
"""

import hmac
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, NamedTuple

from ...errors import StorageError
from ..handshake import SessionKeys

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers import AEADEncryptionContext

TAG_BYTES: Final = 16
_NONCE_BYTES: Final = 12


class WrongTagError(StorageError):
    """A frame is not the one that the other side sent next."""

    def __init__(self) -> None:
        super().__init__(
            "a frame that is not authentic: it was changed, repeated or left out on its way"
        )


class FrameTags:
    """The tags of one direction of one connection, in their order."""

    def __init__(self, key: bytes = b"") -> None:
        """Without a key tags are empty."""
        self._key = key
        self._count = 0
        self.nbytes: Final = TAG_BYTES if key else 0
        if key:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM

            self._cipher = AESGCM(key)

    def room(self) -> memoryview:
        """Return memory to receive a tag into."""
        return memoryview(bytearray(self.nbytes))

    def of(self, data: bytes | memoryview) -> bytes:
        """Return the next tag, of `data`."""
        if not self._key:
            return b""
        return self._cipher.encrypt(self._nonce(), b"", data)

    def require(self, data: bytes | memoryview, tag: bytes | memoryview) -> None:
        """Raise `StorageError` unless `tag` is the next one, and of `data`."""
        if not hmac.compare_digest(self.of(data), tag):
            raise WrongTagError

    def begin(self) -> "RunningTag":
        """Return the next tag, of what will be added to it."""
        if not self._key:
            return RunningTag(None)
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

        cipher = Cipher(algorithms.AES(self._key), modes.GCM(self._nonce()))
        return RunningTag(cipher.encryptor())

    def _nonce(self) -> bytes:
        self._count += 1
        return self._count.to_bytes(_NONCE_BYTES, "big")


class RunningTag:
    """A tag of memory that is added view by view, and not copied."""

    def __init__(self, context: "AEADEncryptionContext | None") -> None:
        self._context = context

    def add(self, views: Iterable[memoryview | bytes]) -> None:
        """Add what follows; it is read now."""
        if self._context is not None:
            for view in views:
                self._context.authenticate_additional_data(view)

    def end(self) -> bytes:
        """Return the tag of all that was added."""
        if self._context is None:
            return b""
        self._context.finalize()
        return self._context.tag

    def require(self, tag: bytes | memoryview) -> None:
        """Raise `StorageError` unless `tag` is that of all that was added."""
        if not hmac.compare_digest(self.end(), tag):
            raise WrongTagError


class ConnectionTags(NamedTuple):
    """The tags of one side of a connection."""

    sent: FrameTags
    received: FrameTags

    @classmethod
    def of_reader(cls, secret: bytes, keys: SessionKeys) -> "ConnectionTags":
        """Return those of the side that has connected."""
        return cls(*(FrameTags(each if secret else b"") for each in keys))

    @classmethod
    def of_server(cls, secret: bytes, keys: SessionKeys) -> "ConnectionTags":
        """Return those of the side that listens."""
        sent, received = cls.of_reader(secret, keys)
        return cls(received, sent)
