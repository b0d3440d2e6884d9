"""What a cache of some size would have hit on a trace: a real replica, and no bytes moved."""
