"""What every transport promises, and ranks that are killed or stopped on the way."""
