"""`join` discovery: a join server shares its process's discovery with other machines over the request plane."""
