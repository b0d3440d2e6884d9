"""Planning: the hit rate of a cache of a given size on a trace, from a real replica without I/O."""
