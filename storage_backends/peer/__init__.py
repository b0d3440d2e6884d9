"""`peer://`: reads pages from the host memory of another group's ranks."""
