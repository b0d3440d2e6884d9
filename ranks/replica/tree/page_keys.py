"""Page keys: a cryptographic hash chain over pages, so that a key stands for a whole prefix.

key[i] = sha256(key[i - 1] + tokens of page i), and key[-1] is the seed of the namespace. Two pages
have the same key only if everything before them, and the namespace, is the same.
"""

from hashlib import sha256

from .tokens import TOKEN_BYTES

KEY_BYTES = 32


def namespace_seed(
    model_digest: bytes,
    namespace: str,
    generation: int = 0,
    life: bytes = b"",
    weights_version: str | None = None,
) -> bytes:
    """Return the start of the chain for one namespace (tenant salt, adapter) of one model.

    Each reset of a cache begins another generation. One that names the version of the weights has the
    keys of that version, in any generation and any life. The keys of one that names none have nothing
    in common with those of any other, nor with those of the same generation in another `life`.
    """
    seed = sha256(model_digest + namespace.encode()).digest()
    if weights_version is not None:
        return sha256(seed + b"weights" + weights_version.encode()).digest()
    if not generation:
        return seed
    return sha256(seed + generation.to_bytes(8, "little") + life).digest()


def page_keys(seed: bytes, tokens: bytes | bytearray, page_tokens: int) -> list[bytes]:
    """Return the keys of the whole pages of `tokens`, which follow the page whose key is `seed`."""
    step = page_tokens * TOKEN_BYTES
    keys: list[bytes] = []
    key = seed
    for at in range(0, len(tokens) - step + 1, step):
        key = sha256(key + tokens[at : at + step]).digest()
        keys.append(key)
    return keys
