"""`s3://`: each page is one S3 object of a bucket."""
