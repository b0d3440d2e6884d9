"""Values that cross layers: settings, orders, effects, notices, answers, the wire format. Pure."""
