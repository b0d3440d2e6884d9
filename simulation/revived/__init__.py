"""Historical bugs of serving engines, put back on purpose to prove that the simulator finds them."""
