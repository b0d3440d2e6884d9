"""Groups that work for one another: what each has cached, who they are, and who gets a request."""
