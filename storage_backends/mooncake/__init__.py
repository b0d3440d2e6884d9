"""`mooncake://`: a Mooncake Store, by its own client."""
