"""What every part of a replica shares: settings, clocks, journal, deadlines and free lists."""
