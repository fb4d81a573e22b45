"""The parts of the webhook sink.

`address` reads the url and says which addresses may be connected to, `request` writes requests,
`answer` says what an answer means, `hiding` keeps secrets out of that, `connection` moves their
bytes, `pool` keeps connections, and `channel` hands events over. The first four do no input or
output.
"""

from .sink import Webhook as Webhook
