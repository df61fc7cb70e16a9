"""Who gets what: chooses a worker for each request."""
