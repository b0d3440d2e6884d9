"""`s3://`: each object in one file of a bucket."""
