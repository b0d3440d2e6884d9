"""What must be true after every step, and what is found where it is not."""
