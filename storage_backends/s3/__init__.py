"""`s3://`: objects in a bucket, one to a file or packed."""
