"""What the tests of the tier of vLLM's own offloading share."""
