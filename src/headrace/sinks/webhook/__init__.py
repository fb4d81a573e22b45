"""The parts of the webhook sink.

`address` reads the url and decides which addresses may be connected to, `request` encodes requests,
`response` turns responses into replies, `pool` keeps connections, and `channel` posts events. The
first three do no input or output.
"""

from .sink import Webhook as Webhook
