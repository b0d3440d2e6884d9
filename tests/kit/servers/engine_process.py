"""A process of its own that reads pages by a transfer engine, or keeps some for engines to read.

Its arguments, one of these:

read <address> <bytes> <namespace> <pool> <shard> <key>
                reads a page of so many bytes that a rank serves again and again
keep <pages>    has pages of 16 KiB in memory, as `page` makes them, and says where: the
                engine's address, then the address of each page

It ends when it is killed, or its standard input ends. It imports no torch, which takes seconds.
"""

import asyncio
import sys

from lockstep.page_format.object_name import ObjectName
from lockstep.page_format.object_shape import ObjectShape
from lockstep.ranks.protocol.engine_settings import EngineSettings
from lockstep.storage_backends.base import Read
from lockstep.storage_backends.buffers import address_of
from lockstep.storage_backends.peer.backend import PeerBackend
from lockstep.storage_backends.peer.transfer_engine import TransferEngine
from tests.kit.storage.calls import page, soon


async def read(address: str, nbytes: int, name: ObjectName) -> None:
    backend = PeerBackend(address, engine=EngineSettings(insists=True))
    await backend.open()
    while True:
        buffer = memoryview(bytearray(nbytes))
        await backend.read([Read(name, (buffer,), ObjectShape.whole(nbytes))], deadline=soon())


def keep(count: int) -> None:
    engine = TransferEngine("tcp", "", "127.0.0.1")
    pages = [memoryview(page(number)) for number in range(count)]
    engine.register(pages)
    sys.stdout.write(f"{engine.address} {' '.join(str(address_of(each)) for each in pages)}\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    if sys.argv[1] == "read":
        where, size, namespace, pool, shard, key = sys.argv[2:]
        asyncio.run(read(where, int(size), ObjectName(namespace, key, pool, shard)))
    else:
        keep(int(sys.argv[2]))
