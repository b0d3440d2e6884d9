"""One rank of a group as an engine sees it: caches, opening, one-scheduler mode, operator requests."""
