"""What is cached: the prefix tree, its pools and pages, and what leaves them."""
