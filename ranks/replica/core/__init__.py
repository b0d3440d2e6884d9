"""Settings, clocks, journal, deadlines and free lists, shared by all parts of a replica."""
