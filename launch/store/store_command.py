"""`lockstep store`: list, verify and clean up a store while engines use it."""

from ..cli.options import command_line
from .removal import gc, rm
from .runs import ls, stat
from .verify import verify

store = command_line("store", help="List, verify and clean up a store (L3) while engines use it.")
for _command in (ls, stat, verify, gc, rm):
    store.command(_command)
