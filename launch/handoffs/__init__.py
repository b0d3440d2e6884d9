"""`lockstep simulate-handoff`."""
