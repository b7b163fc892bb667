"""A folder or a bucket, behind one interface. Shared by every room."""
