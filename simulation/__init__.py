"""N replicas under virtual time and faults; a seed replays a run exactly."""
