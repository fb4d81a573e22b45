"""Signatures: the document's own verifier accepts what we sign, and nothing else."""

import hashlib
import hmac
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.formats.signature import sign, verify
from tests.formats.savegress_document import SEEDS

# As it stands in the document.
_snippet: dict[str, Any] = {}
exec((SEEDS / "s0_verifier.txt").read_text(), _snippet)
verify_signature = _snippet["verify_signature"]


@pytest.mark.requirement("S0-39", "S0-40")
@given(st.binary(), st.text())
def test_the_documents_verifier_accepts_what_we_sign(body: bytes, secret: str) -> None:
    signature = sign(body, secret)
    assert verify_signature(body, signature, secret) is True
    assert verify(body, signature, secret)


@pytest.mark.requirement("S0-39")
def test_a_signature_is_the_lower_hex_of_the_hmac() -> None:
    body, secret = b'{"id":"evt-abc123"}', "schlüssel"
    signature = sign(body, secret)
    assert re.fullmatch(r"sha256=[0-9a-f]{64}", signature)
    assert signature == "sha256=" + hmac.digest(secret.encode(), body, hashlib.sha256).hex()


@pytest.mark.requirement("S0-40")
@given(st.binary(), st.text())
def test_another_body_secret_or_signature_is_refused(body: bytes, secret: str) -> None:
    signature = sign(body, secret)
    assert not verify(body + b" ", signature, secret)
    assert not verify(body, signature, secret + "x")
    for wrong in ("", signature[7:], signature.upper(), signature[:-1], signature + "0"):
        assert not verify(body, wrong, secret)


@pytest.mark.requirement("S0-40")
@given(st.text(st.characters()))
def test_any_text_may_come_as_a_signature(signature: str) -> None:
    assert not verify(b"{}", signature, "secret")
