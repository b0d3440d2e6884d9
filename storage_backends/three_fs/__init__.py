"""`3fs://`: objects in slots of large files, moved by 3FS's USRBIO rings or by system calls."""
