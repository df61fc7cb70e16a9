"""Adapter for SGLang: its schedulers run below a host process; tokens in, tokens out.

worker process                        host process (`host`)               SGLang's schedulers
`engine`, `host_supervisor` -- `messages` over a socket pair -- `launch`, ZMQ sockets -- `scheduler`

SGLang's TokenizerManager and detokenizer are not started: the host talks to the schedulers directly, so no text is
produced and a scheduler's step is one message. The host is a separate process because SGLang kills its parent when one
of its processes fails (SIGQUIT), and changes signal handlers, environment and event loop policy.
"""
