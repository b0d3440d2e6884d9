"""`3fs://`: keeps objects in slots of large files; uses 3FS's USRBIO rings or system calls."""
