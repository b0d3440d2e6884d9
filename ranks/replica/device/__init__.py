"""Device pages by owner: the replica itself, or an engine that lends them."""
