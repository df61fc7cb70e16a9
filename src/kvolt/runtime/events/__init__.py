"""Event plane: best-effort publish/subscribe.

zmq_plane      between processes without a cluster key: a port for each publisher
plane_events   with a cluster key: streams of the request plane
mem            within one process, and for virtual clusters
"""
