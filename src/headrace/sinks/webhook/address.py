"""Where events are posted to, and whether an address may be connected to."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from urllib.parse import quote, urlsplit

from ...errors import ConfigError

IpAddress = IPv4Address | IPv6Address

_PORTS = {"http": 80, "https": 443}
_PATH = "/%:@!$&'()*+,;=-._~"  # what a path may hold as it is; % so that nothing is encoded twice

# The special addresses of IANA's registries, and what clouds answer on inside a machine.
_SPECIAL_4 = [
    (IPv4Network(network), word)
    for network, word in (
        ("0.0.0.0/8", "an address of this machine"),
        ("10.0.0.0/8", "a private address"),
        ("100.64.0.0/10", "a provider's shared address"),
        ("127.0.0.0/8", "a loopback address"),
        ("168.63.129.16/32", "the address of a cloud's metadata"),
        ("169.254.169.254/32", "the address of a cloud's metadata"),
        ("169.254.0.0/16", "a link-local address"),
        ("172.16.0.0/12", "a private address"),
        ("192.0.0.0/24", "a reserved address"),
        ("192.0.2.0/24", "an address for documentation"),
        ("192.88.99.0/24", "a reserved address"),
        ("192.168.0.0/16", "a private address"),
        ("198.18.0.0/15", "an address for benchmarks"),
        ("198.51.100.0/24", "an address for documentation"),
        ("203.0.113.0/24", "an address for documentation"),
        ("224.0.0.0/4", "a multicast address"),
        ("240.0.0.0/4", "a reserved address"),
    )
]
_SPECIAL_6 = [
    (IPv6Network(network), word)
    for network, word in (
        ("::/128", "an address of this machine"),
        ("::1/128", "a loopback address"),
        ("fd00:ec2::254/128", "the address of a cloud's metadata"),
        ("fc00::/7", "a private address"),
        ("fe80::/10", "a link-local address"),
        ("fec0::/10", "a private address"),
        ("ff00::/8", "a multicast address"),
        ("2001::/23", "a reserved address"),
        ("2001:db8::/32", "an address for documentation"),
        ("3fff::/20", "an address for documentation"),
    )
]
_PUBLIC_6 = IPv6Network("2000::/3")  # all that has been given to anybody
_MAPPED = IPv6Network("::ffff:0:0/96")
_TRANSLATED = IPv6Network("64:ff9b::/96")  # NAT64: the IPv4 address is its end
_TUNNELLED = IPv6Network("2002::/16")  # 6to4: the IPv4 address follows
_ISATAP = (0x00005EFE, 0x02005EFE)  # before the IPv4 address at the end


def special(address: IpAddress) -> str:
    """What kind of address it is, if it is none of the public internet; else ""."""
    if isinstance(address, IPv4Address):
        return next((word for network, word in _SPECIAL_4 if address in network), "")
    inner = _embedded(address)
    if inner is not None and (word := special(inner)):
        return word
    if word := next((word for network, word in _SPECIAL_6 if address in network), ""):
        return word
    carried = address in _MAPPED or address in _TRANSLATED
    return "" if carried or address in _PUBLIC_6 else "a reserved address"


def _embedded(address: IPv6Address) -> IPv4Address | None:
    """The IPv4 address to which a network would carry what is sent to this one."""
    number = int(address)
    if address in _MAPPED or address in _TRANSLATED or (number >> 32 & 0xFFFFFFFF) in _ISATAP:
        return IPv4Address(number & 0xFFFFFFFF)
    if address in _TUNNELLED:
        return IPv4Address(number >> 80 & 0xFFFFFFFF)
    return None


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A url, taken apart. Its path may be all that protects it, so only `origin` is for eyes."""

    scheme: str
    host: str
    port: int
    target: str  # path and query

    def __repr__(self) -> str:
        return f"Endpoint({self.origin!r})"

    @property
    def tls(self) -> bool:
        """Whether it is spoken to under TLS."""
        return self.scheme == "https"

    @property
    def authority(self) -> str:
        """What the header Host says."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def origin(self) -> str:
        """Which server it is on."""
        return f"{self.scheme}://{self.authority}"


def endpoint(url: str, *, private: bool) -> Endpoint:
    """The url, taken apart, or a ConfigError that says nothing of it but what is wrong."""
    if any(character <= " " or character == "\x7f" for character in url):
        raise ConfigError("url: it holds a space or a control character; leave it out")
    try:
        parts = urlsplit(url)
        port, host = parts.port, (parts.hostname or "").encode("idna").decode()
    except ValueError:  # also of a host that no name can be
        raise ConfigError("url: its host or port cannot be read") from None
    if parts.scheme not in _PORTS or not host:
        raise ConfigError("url: it does not begin with https:// and a host")
    if parts.username is not None or parts.password is not None:
        raise ConfigError(
            "url: it holds a user or a password; give them in headers, as Authorization"
        )
    if port == 0:
        raise ConfigError("url: its port is 0, at which nobody can be")
    if parts.fragment:
        raise ConfigError("url: it ends in a # part, which is never sent; leave it out")
    if not private:
        _expect_public(parts.scheme, host)
    target = quote(parts.path or "/", safe=_PATH)
    if parts.query:
        target += "?" + quote(parts.query, safe=_PATH + "?")
    return Endpoint(parts.scheme, host, port or _PORTS[parts.scheme], target)


def _expect_public(scheme: str, host: str) -> None:
    if scheme != "https":
        raise ConfigError(
            "url: only https:// is allowed; set allow_private_networks: true for http:// "
            "within a network of your own"
        )
    literal = _literal(host.removesuffix("."))  # a name may end so, and then be an address
    if literal is not None and (word := special(literal)):
        raise ConfigError(f"url: {not_allowed(host, literal, word)}")


def _literal(host: str) -> IpAddress | None:
    """The address that a host is, also in the spellings that only C libraries know."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        pass
    try:
        return IPv4Address(socket.inet_aton(host))  # 2130706433, 0x7f.1
    except OSError:
        return None


def not_allowed(host: str, address: IpAddress, kind: str) -> str:
    """Why an address is not connected to."""
    where = kind if host == str(address) else f"at {address}, {kind}"
    return (
        f"{host} is {where}; set allow_private_networks: true if events may go into a network "
        "of your own"
    )
