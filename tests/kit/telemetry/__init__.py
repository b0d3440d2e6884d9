"""Groups whose metrics and traces are read while they serve requests."""
