"""One rank's tree over SGLang's own pools and allocators, without an engine above it."""
