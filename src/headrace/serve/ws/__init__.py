"""The WebSocket at /v1/stream.

`messages` and `session` do no I/O; `resume` finds in the log what a returning
client gets; `connection` and `frames` move bytes; `route` is the route.
"""
