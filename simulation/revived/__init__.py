"""Historical bugs of serving engines, reintroduced on purpose."""
