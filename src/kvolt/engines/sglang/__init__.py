"""SGLang as an engine of kvolt: its schedulers below a process of their own, tokens in and tokens out.

worker process                     host process (`host`)               SGLang's schedulers
`engine`, `host_life` -- `messages` over a socket pair -- `launch`, ZMQ sockets -- `scheduler`

Its TokenizerManager and its detokenizer are not started: the host speaks to the schedulers in their place, so no text
is made and a step of a scheduler is one message. The host is a process of its own because SGLang ends the process that
started it when one of its own fails (SIGQUIT), and sets signals, environment and loop policy as it likes.
"""
