"""`peer://`: pages that the ranks of another group have on their hosts, read from there."""
