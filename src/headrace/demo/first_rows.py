"""The shop's first rows, for databases that do not make them up themselves."""

import json
import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from hashlib import md5
from typing import Any, NamedTuple
from uuid import UUID

CITIES = ("Bergen", "Łódź", "São Paulo", "大阪")
STATUSES = ("new", "paid", "shipped")
CUSTOMERS, PRODUCTS, ORDERS, LINES = 2000, 300, 4000, 2

_OPENED = datetime(2026, 1, 1, 8, tzinfo=UTC)


class Customer(NamedTuple):
    """A row of customers."""

    id: int
    email: str
    name: str
    address: str  # JSON
    interests: tuple[str, ...]
    joined_at: datetime


class Product(NamedTuple):
    """A row of products."""

    id: int
    name: str
    price: Decimal
    weight: float
    attributes: str  # JSON
    manual: str | None  # a large one


class Order(NamedTuple):
    """A row of orders, and the prices of its items."""

    id: str
    customer_id: int
    status: str
    placed_at: datetime
    prices: tuple[Decimal, ...]


def customers() -> Iterator[Customer]:
    """Those who have registered."""
    for n in range(1, CUSTOMERS + 1):
        address = {"city": CITIES[n % 4], "zip": f"{n * 7919 % 100000:05d}", "geo": [n / 8, -n]}
        interests = () if n % 3 == 0 else ("books", "tea")
        email, joined = f"customer{n}@example.com", _OPENED - timedelta(hours=n)
        yield Customer(n, email, f"Customer {n}", _json(address), interests, joined)


def products() -> Iterator[Product]:
    """What there is to buy."""
    chance = random.Random("products")
    for n in range(1, PRODUCTS + 1):
        manual = "".join(md5(f"{n} {m}".encode()).hexdigest() for m in range(300))
        attributes = _json({"color": n % 5, "fragile": n % 2 == 0})
        yield Product(
            n,
            f"Product {n}",
            _price(chance),
            chance.random() * 10,
            attributes,
            manual if n % 10 == 0 else None,
        )


def orders() -> Iterator[Order]:
    """What was bought before."""
    chance = random.Random("orders")
    for n in range(1, ORDERS + 1):
        id = UUID(int=chance.getrandbits(128), version=4)
        prices = tuple(_price(chance) for _ in range(LINES))
        placed = _OPENED - timedelta(minutes=n)
        yield Order(str(id), 1 + n % CUSTOMERS, STATUSES[n % 3], placed, prices)


def _price(chance: random.Random) -> Decimal:
    return Decimal(chance.randrange(10_000)) / 100


def _json(document: Any) -> str:
    return json.dumps(document, ensure_ascii=False)
