"""Report what agreement costs: `python -m lockstep.benchmarks.scale --report FILE.json`."""

from .report import main

main()
