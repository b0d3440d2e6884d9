"""A small serving engine that fills a cache with known bytes; used by the replay and demo commands."""
