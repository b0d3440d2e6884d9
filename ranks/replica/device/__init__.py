"""Device pages, by who owns them: the replica itself, or an engine that lends them."""
