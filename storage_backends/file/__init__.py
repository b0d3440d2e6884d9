"""`file://`: one file per object."""
