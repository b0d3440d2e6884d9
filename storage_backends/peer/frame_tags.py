"""Authentication tags for the frames of a connection between two processes with a shared secret.

A tag is a GMAC: AES-256-GCM without plaintext, over the frame as additional data. Each direction has
its own key from the handshake, and the nonce is the tag's sequence number in that direction. So the tag
is invalid if a frame was changed, dropped, repeated, reordered or reflected.

Pages are authenticated but not encrypted. GMAC reads pages in place, while AES-GCM has half the speed
and copies every page before sending (docs/performance.md). Without a secret there are no tags.
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
    """A frame's tag is invalid, so the frame is not the next one that the other side sent."""

    def __init__(self) -> None:
        super().__init__("a frame is not authentic: it was changed, repeated or dropped in transit")


class FrameTags:
    """Computes and checks the authentication tags of one direction of one connection.

    Tags are numbered, so they must be computed or checked in the order of sending.
    """

    def __init__(self, key: bytes = b"") -> None:
        """`key` is the key of this direction; without a key every tag is empty."""
        self._key = key
        self._count = 0
        self.nbytes: Final = TAG_BYTES if key else 0
        if key:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM

            self._cipher = AESGCM(key)

    def room(self) -> memoryview:
        """Return memory that is large enough for one authentication tag."""
        return memoryview(bytearray(self.nbytes))

    def of(self, data: bytes | memoryview) -> bytes:
        """Return the authentication tag of `data`, the next part of a frame in this direction."""
        if not self._key:
            return b""
        return self._cipher.encrypt(self._nonce(), b"", data)

    def require(self, data: bytes | memoryview, tag: bytes | memoryview) -> None:
        """Raise `StorageError` unless `tag` authenticates `data`, the next part of a received frame."""
        if not hmac.compare_digest(self.of(data), tag):
            raise WrongTagError

    def begin(self) -> "RunningTag":
        """Return an object that computes the next authentication tag from data added in steps."""
        if not self._key:
            return RunningTag(None)
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

        cipher = Cipher(algorithms.AES(self._key), modes.GCM(self._nonce()))
        return RunningTag(cipher.encryptor())

    def _nonce(self) -> bytes:
        self._count += 1
        return self._count.to_bytes(_NONCE_BYTES, "big")


class RunningTag:
    """An authentication tag over several views of memory, which are added without copies."""

    def __init__(self, context: "AEADEncryptionContext | None") -> None:
        self._context = context

    def add(self, views: Iterable[memoryview | bytes]) -> None:
        """Add views to the data of the tag. Their memory is read before the return."""
        if self._context is not None:
            for view in views:
                self._context.authenticate_additional_data(view)

    def end(self) -> bytes:
        """Return the authentication tag of all added views."""
        if self._context is None:
            return b""
        self._context.finalize()
        return self._context.tag

    def require(self, tag: bytes | memoryview) -> None:
        """Raise `StorageError` unless `tag` is the authentication tag of all added views."""
        if not hmac.compare_digest(self.end(), tag):
            raise WrongTagError


class ConnectionTags(NamedTuple):
    """The authentication tags of both directions of a connection, as one of its sides uses them."""

    sent: FrameTags
    received: FrameTags

    @classmethod
    def of_reader(cls, secret: bytes, keys: SessionKeys) -> "ConnectionTags":
        """Return the tags for the connecting side, one `FrameTags` per direction."""
        return cls(*(FrameTags(each if secret else b"") for each in keys))

    @classmethod
    def of_server(cls, secret: bytes, keys: SessionKeys) -> "ConnectionTags":
        """Return the tags for the listening side, one `FrameTags` per direction."""
        sent, received = cls.of_reader(secret, keys)
        return cls(received, sent)
