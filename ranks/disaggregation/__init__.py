"""What groups that prefill and groups that decode have to do with each other."""
