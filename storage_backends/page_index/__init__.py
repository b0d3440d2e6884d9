"""Where each object's bytes lie, kept by an existing database."""
