"""`mooncake://`: a Mooncake Store, accessed by Mooncake's client library."""
