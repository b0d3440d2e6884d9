"""`lockstep store`: list, verify and clean up a store while engines use it."""

from ..cli.options import command_line
from .removal import gc, rm
from .runs import ls, stat
from .verify import verify

store = command_line(
    "store", help="Look into a store (L3), verify it and tidy it, while engines use it."
)
for _command in (ls, stat, verify, gc, rm):
    store.command(_command)
