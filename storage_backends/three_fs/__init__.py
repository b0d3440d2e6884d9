"""`3fs://`: objects in slots of large files, by rings."""
