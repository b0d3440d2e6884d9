"""Groups that are watched while they serve."""
