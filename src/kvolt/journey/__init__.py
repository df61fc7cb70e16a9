"""Life cycle of one request, from routing to the end of its answer."""
