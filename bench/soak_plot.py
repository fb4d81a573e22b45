"""What a soak measured, as a drawing that needs nothing to be read."""

from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT, LEFT, TOP = 1000, 360, 70, 40
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e")
HEALTH = {"healthy": "#2ca02c", "degraded": "#ffbf00", "unhealthy": "#d62728", "": "#cccccc"}

Series = Sequence[tuple[float, float]]  # seconds, value


def drawing(
    memory: Mapping[str, Series],
    health: Sequence[tuple[float, str]],
    restarts: Sequence[tuple[float, str]],
) -> str:
    """Memory by process in MB, what /health said below it, and a line for each restart."""
    end = max([at for series in memory.values() for at, _ in series], default=1.0)
    top = max([value for series in memory.values() for _, value in series], default=1.0) * 1.1

    def x(at: float) -> float:
        return LEFT + at / end * (WIDTH - LEFT - 20)

    def y(value: float) -> float:
        return TOP + HEIGHT * (1 - value / top)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {TOP + HEIGHT + 90}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for at, name in restarts:
        parts.append(
            f'<line x1="{x(at):.1f}" x2="{x(at):.1f}" y1="{TOP}" y2="{TOP + HEIGHT}" '
            f'stroke="#dddddd"><title>{escape(name)}</title></line>'
        )
    for value in range(0, int(top), _step(top)):
        parts.append(
            f'<text x="{LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{value} MB</text>'
        )
    for minute in range(0, int(end / 60) + 1, max(1, int(end / 600))):
        parts.append(
            f'<text x="{x(minute * 60):.1f}" y="{TOP + HEIGHT + 18}" text-anchor="middle">'
            f"{minute} min</text>"
        )
    for number, (name, series) in enumerate(memory.items()):
        colour = COLOURS[number % len(COLOURS)]
        points = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in series)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}"/>')
        parts.append(
            f'<text x="{LEFT + number * 170}" y="24" fill="{colour}">{escape(name)}</text>'
        )
    for (at, status), (until, _) in zip(health, [*health[1:], (end, "")], strict=True):
        parts.append(
            f'<rect x="{x(at):.1f}" y="{TOP + HEIGHT + 34}" height="20" '
            f'width="{max(x(until) - x(at), 0):.1f}" fill="{HEALTH.get(status, "#000000")}"/>'
        )
    parts.append(f'<text x="{LEFT}" y="{TOP + HEIGHT + 72}">/health; grey: it was killed</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _step(top: float) -> int:
    """Between two labels of the axis."""
    return max(50, round(top / 8 / 50) * 50)
