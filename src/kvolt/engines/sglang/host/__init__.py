"""The process that runs SGLang for a worker: how it is started, and what the two say to each other (`messages`)."""
