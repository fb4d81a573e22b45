"""What was measured of delivery, as tables."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from .delivery_clients import Kind, Told
from .report import Figure, Figures, Row

P50, P99 = 10, 100  # ms
LEAST_DELIVERIES = 50_000  # a second
MOST_IDLE = 25  # KB a client
MOST_SLOW = 2048  # KB a client
KEEPING_UP = 0.98  # of an offer; with less, delays only look good
NAMES: Mapping[Kind, str] = {"websocket": "WebSocket", "sse": "SSE"}
RANKS = ("p50", "p99")
USERS = ("server", "capture", "PostgreSQL", "clients")


@dataclass(frozen=True, slots=True)
class Grid:
    """A table of several measured cases, and what was reached."""

    title: str
    header: Row
    rows: Sequence[Row]
    reached: Sequence[str] = ()
    remarks: Sequence[str] = ()

    def table(self) -> tuple[Row, list[Row]]:
        """A header, and a row for each case."""
        return self.header, list(self.rows)

    def verdicts(self) -> Iterator[str]:
        """A line for each target."""
        return iter(self.reached)

    def notes(self) -> Iterator[str]:
        """What else is worth knowing."""
        return iter(self.remarks)


def verdict(what: str, figure: Figure) -> str:
    """A measured number beside its target, as a sentence."""
    reached = "reached" if figure.met else "missed"
    return (
        f"{what}: {figure.name} {figure.value:,.1f} {figure.unit}; "
        f"the target is {figure.target}: {reached}."
    )


def _cores(used: Mapping[str, float], seconds: float) -> Row:
    """Shares of a core, by who used it."""
    return tuple(f"{100 * used[who] / seconds:.0f} %" if who in used else "" for who in USERS)


# --- commit to client ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Delay:
    """How long changes took to many clients of one protocol."""

    kind: Kind
    told: Told
    used: Mapping[str, float]  # seconds of processor time, by who used it


def delays(measured: Sequence[Delay], *, subscribers: int, rate: int) -> Grid:
    """The delays of every delivery."""
    ranks = ("p50", "p99", "p99.9", "worst")
    header = ("", *(f"{rank}, ms" for rank in ranks), "deliveries/s", *USERS)
    rows = [
        (
            NAMES[each.kind],
            *(f"{each.told.delays[rank]:.1f}" for rank in ranks),
            f"{each.told.rate:,.0f}",
            *_cores(each.used, each.told.seconds),
        )
        for each in measured
    ]
    reached = [
        verdict(NAMES[each.kind], figure)
        for each in measured
        for figure in (
            Figure("p50", each.told.delays["p50"], "ms", below=P50),
            Figure("p99", each.told.delays["p99"], "ms", below=P99),
        )
    ]
    late = [
        f"{NAMES[each.kind]} fell behind what was written, so its delays say little."
        for each in measured
        if each.told.rate < KEEPING_UP * subscribers * rate
    ]
    title = f"Commit → {subscribers} clients, at {rate:,} changes/s"
    return Grid(title, header, rows, [*reached, *late])


# --- fan-out -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Offer:
    """How many clients are told how much."""

    subscribers: int
    rate: int  # events a second

    def __str__(self) -> str:
        return f"{self.subscribers:,} × {self.rate:,}/s"

    @property
    def deliveries(self) -> int:
        """A second."""
        return self.subscribers * self.rate


@dataclass(frozen=True, slots=True)
class Reached:
    """What became of an offer."""

    offer: Offer
    who: str
    told: Told
    used: Mapping[str, float]  # seconds of processor time, by who used it

    @property
    def cost(self) -> float:
        """Microseconds of the server's processor time for a delivery."""
        return self.used["server"] / self.told.deliveries * 1e6


def fanout(measured: Sequence[Reached]) -> Grid:
    """Deliveries a second, and what they cost."""
    header = ("offered", "", "deliveries/s", "of the offer", "µs of the server each", *USERS)
    rows = [
        (
            str(each.offer),
            each.who,
            f"{each.told.rate:,.0f}",
            f"{100 * each.told.rate / each.offer.deliveries:.0f} %",
            f"{each.cost:.1f}",
            *_cores(each.used, each.told.seconds),
        )
        for each in measured
    ]
    ours = [each for each in measured if each.who == "Headrace"]
    reached = [_kept_up(each) for each in ours if each.offer.deliveries == LEAST_DELIVERIES]
    most = max(ours, key=lambda each: each.told.rate)
    figure = Figure(str(most.offer), most.told.rate, "deliveries/s", at_least=LEAST_DELIVERIES)
    reached.append(verdict("the most that was seen", figure))
    size = f"A delivery has {measured[0].told.size:.0f} bytes."
    return Grid("Fan-out from one process over WebSockets", header, rows, reached, [size])


def _kept_up(each: Reached) -> str:
    """Of an offer that is the target itself, nobody can get more."""
    kept_up = each.told.rate >= KEEPING_UP * each.offer.deliveries
    return (
        f"{each.offer}: {each.told.rate:,.0f} deliveries/s of the {each.offer.deliveries:,} that "
        f"were offered and are the target: {'kept up' if kept_up else 'fell behind'}."
    )


# --- what a client costs -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Idle:
    """Clients that are only there."""

    subscribers: int
    each: float  # KB
    percent: float  # of a core, the whole server


def idle(measured: Idle) -> Figures:
    """Their cost."""
    return Figures(
        f"{measured.subscribers:,} idle WebSockets",
        [
            Figure("resident set of the server, for each", measured.each, "KB", below=MOST_IDLE),
            Figure("the server beside them", measured.percent, "% of a core"),
        ],
    )


@dataclass(frozen=True, slots=True)
class Slow:
    """Clients that stopped reading, and those beside them."""

    kind: Kind
    each: float  # KB that one of them costs, in the process and in the kernel
    kernel: float  # KB of it in the kernel
    alone: Told  # the others before
    beside: Told  # the others while these read nothing


def slow(measured: Sequence[Slow], *, stuck: int) -> Grid:
    """Their cost, and what they do to others."""
    header = (
        f"{stuck} that stopped reading", "KB each", "of it in the kernel",
        "p50 of others, ms", "p99", "p50 without them, ms", "p99",
    )  # fmt: skip
    rows = [
        (
            NAMES[each.kind],
            f"{each.each:,.0f}",
            f"{each.kernel:,.0f}",
            *(f"{told.delays[rank]:.1f}" for told in (each.beside, each.alone) for rank in RANKS),
        )
        for each in measured
    ]
    reached = [
        verdict(NAMES[each.kind], Figure("each costs", each.each, "KB", below=MOST_SLOW))
        for each in measured
    ]
    return Grid("Clients that stop reading", header, rows, reached)
