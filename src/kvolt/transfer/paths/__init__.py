"""Transfer paths: which exist, how fast each is, which one a read takes."""
