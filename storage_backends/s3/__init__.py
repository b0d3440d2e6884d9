"""`s3://`: a store that keeps each page as one S3 object of a bucket."""
