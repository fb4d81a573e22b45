"""Receivers know what Headrace signed, with our function and with that of Standard Webhooks."""

import base64
import time
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from standardwebhooks.webhooks import Webhook as Standard
from standardwebhooks.webhooks import WebhookVerificationError

from headrace.client import webhooks
from headrace.errors import SignatureInvalid
from headrace.formats.signature import sign, sign_standard, standard_key

KEY = base64.b64encode(b"a key of twenty-four byte").decode()
SECRET, OTHER = f"whsec_{KEY}", "another secret, as it is"
BODY = b'{"id":"evt_1"}'


def signed(
    body: bytes = BODY, *secrets: str, message: str = "evt_1", at: int | None = None
) -> dict[str, str]:
    """The headers of a request, as a sink writes them."""
    now = int(time.time()) if at is None else at
    keys = [standard_key(secret) for secret in secrets or (SECRET,)]
    return {
        "webhook-id": message,
        "webhook-timestamp": str(now),
        "webhook-signature": " ".join(sign_standard(body, message, now, key) for key in keys),
    }


@pytest.mark.requirement("C-17")
@given(st.binary(), st.text("abcdef0123456789_-", min_size=1))
def test_what_was_signed_is_verified_and_gives_its_id(body: bytes, message: str) -> None:
    assert webhooks.verify(body, signed(body, message=message), SECRET) == message


@pytest.mark.requirement("C-17")
@given(st.text(min_size=1))
def test_the_library_of_standard_webhooks_takes_what_we_sign_and_we_what_it_signs(
    body: str,
) -> None:
    document = f'{{"text":"{base64.b64encode(body.encode()).decode()}"}}'
    standard = Standard(SECRET)
    headers = signed(document.encode())
    assert standard.verify(document, headers)
    now = datetime.now(UTC)
    headers = {
        "webhook-id": "msg_1",
        "webhook-timestamp": str(int(now.timestamp())),
        "webhook-signature": standard.sign("msg_1", now, document),
    }
    assert webhooks.verify(document.encode(), headers, SECRET) == "msg_1"
    with pytest.raises(WebhookVerificationError):
        standard.verify(document + " ", headers)
    with pytest.raises(SignatureInvalid):
        webhooks.verify(document.encode() + b" ", headers, SECRET)


def test_while_a_secret_is_replaced_either_side_may_be_first() -> None:
    both = signed(BODY, SECRET, OTHER)
    for known in (SECRET, OTHER, [SECRET, OTHER], ["a third", SECRET]):
        assert webhooks.verify(BODY, both, known) == "evt_1"
    assert webhooks.verify(BODY, signed(BODY, OTHER), [SECRET, OTHER]) == "evt_1"
    with pytest.raises(SignatureInvalid, match="no signature"):
        webhooks.verify(BODY, signed(BODY, OTHER), SECRET)
    with pytest.raises(SignatureInvalid, match="no signature"):
        webhooks.verify(BODY, both, [])


@pytest.mark.requirement("C-17")
def test_a_request_is_worth_nothing_five_minutes_later_or_with_another_time() -> None:
    headers = signed(at=1_000_000)
    for now in (1_000_300, 999_700):
        assert webhooks.verify(BODY, headers, SECRET, now=now) == "evt_1"
    with pytest.raises(SignatureInvalid, match="signed 301 s ago"):
        webhooks.verify(BODY, headers, SECRET, now=1_000_301)
    with pytest.raises(SignatureInvalid, match="signed 301 s ahead"):
        webhooks.verify(BODY, headers, SECRET, now=999_699)
    assert webhooks.verify(BODY, headers, SECRET, now=1_000_301, tolerance=600) == "evt_1"
    for tolerance in (float("nan"), -1.0):
        with pytest.raises(SignatureInvalid, match="s ago"):
            webhooks.verify(BODY, headers, SECRET, now=1_000_001, tolerance=tolerance)
    # Whoever catches a request cannot make it a new one.
    headers["webhook-timestamp"] = "1000301"
    with pytest.raises(SignatureInvalid, match="no signature"):
        webhooks.verify(BODY, headers, SECRET, now=1_000_301)
    headers = signed(at=1_000_000) | {"webhook-id": "evt_2"}
    with pytest.raises(SignatureInvalid, match="no signature"):
        webhooks.verify(BODY, headers, SECRET, now=1_000_000)


def test_names_of_headers_may_be_written_in_any_way() -> None:
    headers = {name.title(): value for name, value in signed().items()}
    assert webhooks.verify(BODY, headers, SECRET) == "evt_1"


@pytest.mark.parametrize("name", ["webhook-id", "webhook-timestamp", "webhook-signature"])
def test_a_request_without_a_header_is_refused_by_the_headers_name(name: str) -> None:
    headers = signed()
    del headers[name]
    with pytest.raises(SignatureInvalid, match=f"no header {name}"):
        webhooks.verify(BODY, headers, SECRET)


@given(st.text())
def test_anything_may_come_as_a_signature_or_a_time(text: str) -> None:
    with pytest.raises(SignatureInvalid):
        webhooks.verify(BODY, signed() | {"webhook-signature": text}, SECRET)
    if not (text.isascii() and text.isdigit()):
        with pytest.raises(SignatureInvalid):
            webhooks.verify(BODY, signed() | {"webhook-timestamp": text}, SECRET)


@pytest.mark.parametrize("secret", ["", "whsec_", "whsec_ä", "whsec_abc", "whsec_a=b="])
def test_a_secret_that_gives_no_key_is_a_mistake_of_the_receiver(secret: str) -> None:
    with pytest.raises(ValueError, match=r"empty|Base64"):
        webhooks.verify(BODY, signed(), secret)


@pytest.mark.requirement("S0-40")
def test_the_documents_verifier_is_there_under_its_name() -> None:
    assert webhooks.verify_signature(BODY, sign(BODY, OTHER), OTHER) is True
    assert webhooks.verify_signature(BODY + b" ", sign(BODY, OTHER), OTHER) is False


def test_an_empty_secret_verifies_nothing() -> None:
    with pytest.raises(ValueError, match="the secret is empty"):
        webhooks.verify_signature(BODY, sign(BODY, ""), "")
    with pytest.raises(ValueError, match="empty"):
        webhooks.verify(BODY, signed(), [SECRET, ""])


def test_no_secret_shows_in_what_is_wrong() -> None:
    with pytest.raises(SignatureInvalid) as caught:
        webhooks.verify(BODY, signed(BODY, OTHER), SECRET)
    assert KEY not in caught.value.explain()
