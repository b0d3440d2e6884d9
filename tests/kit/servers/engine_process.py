"""A process of its own that keeps pages for transfer engines to read; its argument says how many.

They are pages of 16 KiB, as `page` makes them. It says where they are: the engine's address, then the
address of each page. It ends when it is killed, or its standard input ends. It imports no torch, which
takes seconds.
"""

import sys

from lockstep.storage_backends.buffers import address_of
from lockstep.storage_backends.peer.transfer_engine import TransferEngine
from tests.kit.storage.calls import page


def keep(count: int) -> None:
    engine = TransferEngine("tcp", "", "127.0.0.1")
    pages = [memoryview(page(number)) for number in range(count)]
    engine.register(pages)
    sys.stdout.write(f"{engine.address} {' '.join(str(address_of(each)) for each in pages)}\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    keep(int(sys.argv[1]))
