"""`lockstep simulate-router`: ways to route requests, compared."""
