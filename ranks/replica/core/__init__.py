"""Settings, clocks, journal, deadlines and free lists that all parts of a replica share."""
