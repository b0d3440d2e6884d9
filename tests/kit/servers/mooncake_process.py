"""A process that joins a Mooncake store, which a test also uses. The test may kill the process.

Arguments, one of:

own <master>      contributes memory to the store, writes pages 0 to 3, and waits
disk <master> <directory>
                               like `own`, but offloads its memory to disk and writes two keys,
                               both with the content of page 1; waits until both are on disk

The process ends when its standard input closes.
"""

import asyncio
import os
import sys
from pathlib import Path

from lockstep.page_format.object_header import encode_object
from lockstep.page_format.object_shape import ObjectShape
from lockstep.storage_backends.base import WriteOutcome
from lockstep.storage_backends.mooncake.backend import MooncakeBackend
from lockstep.storage_backends.mooncake.client import MooncakeSettings
from lockstep.storage_backends.mooncake.names import key_of
from tests.kit.servers.processes import until
from tests.kit.storage.calls import KIB, digest_of, object_name, page, put

WHOLE = ObjectShape.whole(16 * KIB)


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


async def own(master: str) -> None:
    backend = MooncakeBackend(MooncakeSettings(master=master, segment_bytes=64 << 20))
    await backend.open()
    for number in range(4):
        assert await put(backend, object_name(number), page(number)) is WriteOutcome.OK
    say("ready")
    await asyncio.to_thread(sys.stdin.read)
    await backend.close()


def keep_on_disk(master: str, directory: str) -> None:
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    network = ("127.0.0.1", "P2PHANDSHAKE", 64 << 20, 16 << 20, "tcp", "", master)
    assert store.setup(*network, None, True, directory) == 0
    if not list(Path(directory).rglob("*.bucket")):
        for number in range(2):
            digest = digest_of(object_name(number))
            name, content = object_name(1), page(1)
            header = encode_object(name, digest_of(name), [memoryview(content)], WHOLE)
            # Store page 1's object under the key of page 0, so that page 0 has wrong content.
            assert store.put(key_of(digest), header + content) == 0
        until(lambda: any(Path(directory).rglob("*.bucket")))
    say("ready")
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1] == "disk":
        keep_on_disk(*sys.argv[2:])
    else:
        asyncio.run(own(sys.argv[2]))
