"""Load generation (`load`) and request traces (`traces`)."""
