"""Each filter is declared once: what HTTP, gRPC and the client offer follows the declaration."""

from typing import get_type_hints

import pytest

from headrace.client.messages import Filters
from headrace.serve.filter import Filter, FilterParameters
from headrace.serve.query import ChangesQuery, ChangesStreamQuery, LeaseQuery, rules
from headrace.v1 import changefeed_pb2 as v1

DECLARED = set(FilterParameters.__struct_fields__)


@pytest.mark.parametrize("query", [ChangesQuery, ChangesStreamQuery, LeaseQuery])
def test_every_route_of_changes_takes_every_filter(query: type[FilterParameters]) -> None:
    described = {name: rule.about for name, rule in rules(query).items() if name in DECLARED}
    assert described.keys() == DECLARED
    assert all(described.values())


@pytest.mark.parametrize("request_type", [v1.SubscribeRequest, v1.PollRequest])
def test_grpc_requests_have_a_field_of_the_same_name_for_every_filter(
    request_type: type[v1.SubscribeRequest | v1.PollRequest],
) -> None:
    assert set(Filter.__struct_fields__) <= set(request_type.DESCRIPTOR.fields_by_name)


def test_the_client_offers_every_filter() -> None:
    assert {*get_type_hints(Filters), "tables"} == DECLARED
