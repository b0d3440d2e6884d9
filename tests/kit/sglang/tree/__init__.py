"""One rank's radix tree over SGLang's pools and allocators, without an engine."""
