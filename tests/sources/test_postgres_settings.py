"""The settings of a PostgreSQL source, and what follows from them without asking the server."""

import pytest

from headrace.secret import Secret
from headrace.sources.postgres import Postgres
from headrace.sources.worker import Apart


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("postgresql://app:hunter2@db1.example.com:5433/shop", "db1.example.com"),
        ("postgresql://app:p%40ss@[2001:db8::1]/shop", "2001:db8::1"),
        ("host=db1 user=app password='a host=b'", "db1"),
        ("hostaddr=10.0.0.7 dbname=shop", "10.0.0.7"),
        ("postgresql://a.example,b.example/shop", "a.example,b.example"),
        ("postgresql:///shop", "localhost"),
        ("dbname=shop", "localhost"),
        ("postgresql://app@/shop?host=/var/run/postgresql", "localhost"),
        ("host=@abstract dbname=shop", "localhost"),
    ],
)
def test_a_source_names_the_host_of_its_url(url: str, host: str) -> None:
    source = Postgres(name="shop", url=Secret(url))
    assert source.host == host
    assert Apart(source).host == host
