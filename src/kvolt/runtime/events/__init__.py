"""Event plane: best-effort publish/subscribe; the `mem` and `zmq` implementations."""
