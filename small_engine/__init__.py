"""A small serving engine that fills a cache with predictable bytes, for replays and the demo."""
