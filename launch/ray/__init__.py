"""Ranks as Ray actors: Ray starts and ends them, and carries no page and no round."""
