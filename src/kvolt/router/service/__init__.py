"""The router as a process for several frontends, as a library, and over HTTP."""
