"""What was measured, as tables: for the terminal and for RESULTS.md."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rich.table import Table

from .process import Outcome

Row = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Runner:
    """One who took part, with every run it made."""

    name: str
    runs: Sequence[Outcome]

    @property
    def best(self) -> Outcome:
        """The run that counts: the fastest, for everyone alike."""
        return max(self.runs, key=lambda outcome: outcome.rate)


@dataclass(frozen=True, slots=True)
class Target:
    """How many times as fast as another the first runner must be, and should be."""

    against: str
    at_least: float
    aim: float | None = None


@dataclass(frozen=True, slots=True)
class Race:
    """The same work done by several; the first is Headrace."""

    title: str
    runners: Sequence[Runner]
    targets: Sequence[Target]

    def ratio(self, name: str, against: str) -> float:
        """How many times as fast one is as another."""
        rates = {runner.name: runner.best.rate for runner in self.runners}
        return rates[name] / rates[against]

    @property
    def others(self) -> list[str]:
        """Everyone but the first."""
        return [runner.name for runner in self.runners[1:]]

    def table(self) -> tuple[Row, list[Row]]:
        """A header, and a row for each runner."""
        header = ("", "rows", "seconds", "rows/s", *(f"× {name}" for name in self.others))
        return (*header, "all runs, rows/s"), [self._row(runner) for runner in self.runners]

    def _row(self, runner: Runner) -> Row:
        best = runner.best
        ratios = (f"{self.ratio(runner.name, other):.2f}" for other in self.others)
        runs = ", ".join(f"{outcome.rate:,.0f}" for outcome in runner.runs)
        return (
            runner.name,
            f"{best.rows:,}",
            f"{best.seconds:.2f}",
            f"{best.rate:,.0f}",
            *ratios,
            runs,
        )

    def verdicts(self) -> Iterator[str]:
        """A line for each target."""
        name = self.runners[0].name
        for target in self.targets:
            ratio = self.ratio(name, target.against)
            aim = f", the aim is {target.aim:g} ×" if target.aim else ""
            verdict = "reached" if ratio >= target.at_least else "missed"
            if target.aim and ratio >= target.aim:
                verdict = "reached, and the aim"
            yield (
                f"{name} is {ratio:.2f} × {target.against}; "
                f"the target is {target.at_least:g} ×{aim}: {verdict}."
            )

    def notes(self) -> Iterator[str]:
        """Further figures of the best runs."""
        for runner in self.runners:
            for what, value in runner.best.notes.items():
                yield f"{runner.name}, {what}: {value:,.0f}."


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number, and what it must stay below or come up to."""

    name: str
    value: float
    unit: str
    below: float | None = None
    at_least: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether it does; None: nothing is asked of it."""
        if self.below is not None:
            return self.value < self.below
        return None if self.at_least is None else self.value >= self.at_least

    @property
    def target(self) -> str:
        """What is asked of it."""
        if self.below is not None:
            return f"< {self.below:g} {self.unit}"
        return "" if self.at_least is None else f"≥ {self.at_least:g} {self.unit}"


@dataclass(frozen=True, slots=True)
class Figures:
    """Numbers that are compared with a target, not with a peer."""

    title: str
    figures: Sequence[Figure]

    def table(self) -> tuple[Row, list[Row]]:
        """A header, and a row for each number."""
        return ("", "measured", "target", ""), [self._row(figure) for figure in self.figures]

    @staticmethod
    def _row(figure: Figure) -> Row:
        verdict = {None: "", True: "reached", False: "missed"}[figure.met]
        return (figure.name, f"{figure.value:,.1f} {figure.unit}", figure.target, verdict)

    def verdicts(self) -> Iterator[str]:
        """The table says it all."""
        return iter(())

    def notes(self) -> Iterator[str]:
        """None."""
        return iter(())


class Section(Protocol):
    """A part of the page: a table, what was reached, and what else is worth knowing."""

    @property
    def title(self) -> str:
        """Its heading."""
        ...

    def table(self) -> tuple[Row, list[Row]]:
        """A header, and rows."""
        ...

    def verdicts(self) -> Iterator[str]:
        """A line for each target."""
        ...

    def notes(self) -> Iterator[str]:
        """Further figures."""
        ...


def terminal(section: Section) -> Table:
    """A section as a table for the terminal."""
    header, rows = section.table()
    table = Table(title=section.title, title_justify="left", caption_justify="left")
    table.caption = "\n".join(section.verdicts()) or None
    for number, column in enumerate(header):
        table.add_column(column, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    return table


def markdown(sections: Sequence[Section], facts: Mapping[str, str]) -> str:
    """Everything as a Markdown page."""
    lines = ["# Results", ""]
    lines += [f"- {name}: {value}" for name, value in facts.items()]
    lines += ["", "How each figure is taken: [README.md](README.md)."]
    for section in sections:
        lines += ["", f"## {section.title}", "", *_markdown_table(*section.table())]
        for remarks in (list(section.verdicts()), list(section.notes())):
            if remarks:
                lines += ["", *(f"- {remark}" for remark in remarks)]
    return "\n".join(lines) + "\n"


def _markdown_table(header: Row, rows: Sequence[Row]) -> Iterator[str]:
    yield _cells(header)
    yield _cells(("---", *("---:" for _ in header[1:])))
    yield from map(_cells, rows)


def _cells(cells: Row) -> str:
    return "".join(f"| {cell} " if cell else "| " for cell in cells) + "|"
