"""Groups that come and go: what each has cached, who they are, and who gets a request."""
