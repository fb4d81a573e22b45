"""Writes the Python code of src/headrace/v1/changefeed.proto; with --check it only compares."""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from grpc_tools import protoc

SOURCES = Path(__file__).parent.parent / "src"
PROTO = "headrace/v1/changefeed.proto"
WRITTEN = (
    "headrace/v1/changefeed_pb2.py",
    "headrace/v1/changefeed_pb2.pyi",
    "headrace/v1/changefeed_pb2_grpc.py",
)


def generate(folder: Path) -> None:
    """Write the code below a folder."""
    messages = Path(protoc.__file__).parent / "_proto"  # those of google.protobuf
    options = [f"-I{SOURCES}", f"-I{messages}"]
    options += [f"--{kind}_out={folder}" for kind in ("python", "pyi", "grpc_python")]
    if protoc.main(["protoc", *options, PROTO]):
        sys.exit(f"src/{PROTO} is not right: see above")


def differing() -> list[str]:
    """Files that are not what the compiler writes."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        generate(folder)
        return [
            path
            for path in WRITTEN
            if not (SOURCES / path).exists()
            or (SOURCES / path).read_bytes() != (folder / path).read_bytes()
        ]


def main() -> int:
    """Write the code, or say that it is out of date."""
    if "--check" not in sys.argv:
        generate(SOURCES)
    elif paths := differing():
        print(f"{', '.join(paths)} not as written from {PROTO}: run `make protos`")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
