"""`peer://`: reads pages from the hosts of another group's ranks."""
