"""`file://`: a store that keeps each object in one file of a directory."""
