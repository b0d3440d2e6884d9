"""`mooncake://`: a Mooncake Store, accessed with its own client."""
