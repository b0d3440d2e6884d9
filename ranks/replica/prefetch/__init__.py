"""Prefetch: lookups in storage, reads, and insertion of the pages that landed."""
