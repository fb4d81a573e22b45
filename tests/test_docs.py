"""What the docs say is so, and the code keeps within its budgets."""

import ast
import importlib.util
import json
import re
import statistics
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))]
MODULES = [
    module
    for module in sorted((ROOT / "src").rglob("*.py"))
    if "_pb2" not in module.stem  # written by protoc
]

LONGEST_MODULE = 700
MOST_PARAMETERS = 6
# Functions that may take more, as "module.function", each with its reason beside it.
MANY_PARAMETERS: frozenset[str] = frozenset(
    {
        "headrace.cli.demo.demo",  # a command has an option for each thing one may set
        "headrace.cli.data.trim",  # as above
        "headrace.cli.erase.erase",  # as above
        "headrace.cli.init.init",  # as above
        "headrace.cli.inspect.tail",  # as above
        "headrace.cli.keys.create",  # as above
        "headrace.cli.sinks.verify",  # as above
    }
)

HAS_CLI = importlib.util.find_spec("headrace.cli") is not None
needs_cli = pytest.mark.skipif(not HAS_CLI, reason="headrace.cli does not exist yet")

# ```python run
RUNNABLE = re.compile(r"^```python run\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)#\s]+)")


def dotted(module: Path) -> str:
    """The name by which a module is imported."""
    parts = module.relative_to(ROOT / "src").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def functions(module: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function and method of a module."""
    tree = ast.parse(module.read_text())
    return [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """How many parameters a caller may give; `*args` and `**kwargs` are not counted."""
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return sum(argument.arg not in ("self", "cls") for argument in every)


def runnable_blocks() -> list[tuple[str, str]]:
    """The blocks of code in the docs that are marked as runnable, with where they stand."""
    blocks = []
    for page in PAGES:
        for match in RUNNABLE.finditer(text := page.read_text()):
            line = text.count("\n", 0, match.start()) + 1
            blocks.append((f"{page.relative_to(ROOT)}:{line}", match[1]))
    return blocks


def run_python(code: str, *, cwd: Path) -> str:
    """What a new Python prints for `code`; a warning is an error."""
    command = [sys.executable, "-W", "error", "-c", code]
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


@needs_cli
def test_every_command_is_documented(tmp_path: Path) -> None:
    listing = (
        "import json, typer.main, headrace.cli as cli\n"
        "def names(command, prefix=''):\n"
        "    for name, child in getattr(command, 'commands', {}).items():\n"
        "        yield prefix + name\n"
        "        yield from names(child, prefix + name + ' ')\n"
        "print(json.dumps(list(names(typer.main.get_command(cli.app)))))\n"
    )
    commands = json.loads(run_python(listing, cwd=tmp_path))
    assert commands
    text = "\n".join(page.read_text() for page in PAGES)
    assert [name for name in commands if f"headrace {name}" not in text] == []


@needs_cli
def test_starting_the_command_line_never_asks_for_spark(tmp_path: Path) -> None:
    watching = (
        "import sys\n"
        "class Watch:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        assert name.partition('.')[0] != 'pyspark', 'pyspark was imported'\n"
        "sys.meta_path.insert(0, Watch())\n"
        "import headrace.cli\n"
    )
    run_python(watching, cwd=tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    targets = LINK.findall(page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("block", runnable_blocks(), ids=lambda block: block[0])
def test_code_in_the_docs_runs(block: tuple[str, str], tmp_path: Path) -> None:
    run_python(block[1], cwd=tmp_path)


def test_modules_stay_short_enough_to_read_at_once() -> None:
    lines = {str(m.relative_to(ROOT)): len(m.read_text().splitlines()) for m in MODULES}
    assert {name: count for name, count in lines.items() if count > LONGEST_MODULE} == {}


def test_functions_take_no_more_parameters_than_a_reader_can_hold() -> None:
    counts = {
        f"{dotted(module)}.{function.name}": parameters(function)
        for module in MODULES
        for function in functions(module)
    }
    too_many = {name for name, count in counts.items() if count > MOST_PARAMETERS}
    assert too_many - MANY_PARAMETERS == set()
    assert MANY_PARAMETERS - too_many == set(), "these no longer need their exception"


def test_half_of_all_functions_fit_in_ten_lines_and_nearly_all_in_thirty() -> None:
    lengths = [
        (function.end_lineno or function.lineno) - function.lineno + 1
        for module in MODULES
        for function in functions(module)
    ]
    assert statistics.median(lengths) <= 10
    assert statistics.quantiles(lengths, n=10)[-1] <= 30


def test_the_architecture_draws_the_layers_that_are_enforced() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    flow = settings["tool"]["importlinter"]["contracts"][0]
    drawing = "\n".join(flow["layers"]).replace("(", "").replace(")", "")
    assert f"```\n{drawing}\n```" in (ROOT / "ARCHITECTURE.md").read_text()


def test_the_architecture_says_what_every_module_is() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text()
    modules = {path.parent for path in MODULES} | set(MODULES)
    stages = [path for path in modules if path.parent.name == "headrace" and path.stem[0] != "_"]
    names = {stage.name if stage.suffix else f"{stage.name}/" for stage in stages}
    assert {name for name in names if f"`{name}`" not in page} == set()
