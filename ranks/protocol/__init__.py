"""Values that cross layers: settings, orders, effects, events, answers, the wire format. Pure."""
