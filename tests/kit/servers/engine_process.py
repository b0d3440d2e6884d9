"""A process whose pages other processes read with a transfer engine.

The argument is the number of pages. Each page has 16 KiB, with the content that the function `page`
returns. The process registers the pages, prints the transfer engine's address and every page's address,
and ends when its standard input closes. It does not import torch, because that import takes seconds.
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
