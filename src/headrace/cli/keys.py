"""The commands for API keys; each loads only what it needs, as all commands do."""

from typing import TYPE_CHECKING, Annotated

import typer

from .options import DEFAULT_CONFIG, AsJson, ConfigFile, KeyFile, ServerUrl, configured

if TYPE_CHECKING:
    from ..log.keys import Scope
    from ..operate.commands import KeyShown

app = typer.Typer(
    no_args_is_help=True,
    help="Make, list, revoke and rotate API keys: in the running server, or without one in the "
    "log itself.",
)

KeyId = Annotated[str, typer.Argument(help="The key's id, as `headrace keys list` shows it.")]


@app.command()
def create(  # noqa: PLR0913, PLR0917 - an option for each limit of a key
    name: Annotated[str, typer.Option(help="What people call it.")] = "",
    tables: Annotated[
        list[str] | None,
        typer.Option(help="Globs between commas: it sees only these. May be given again."),
    ] = None,
    tenant: Annotated[
        str | None, typer.Option(help="It sees only rows of this tenant (see model.tenant).")
    ] = None,
    scope: Annotated[
        list[str] | None,
        typer.Option(help="cdc:read or cdc:admin. May be given again.", show_default="cdc:read"),
    ] = None,
    expires: Annotated[
        str | None, typer.Option(help="How long it is valid: 90d, 12h.", metavar="AGE")
    ] = None,
    connections: Annotated[
        int | None, typer.Option(help="At most so many connections at once.", min=1)
    ] = None,
    requests_per_second: Annotated[
        float | None, typer.Option(help="At most so many requests a second.")
    ] = None,
    events_per_second: Annotated[
        float | None, typer.Option(help="At most so many events a second.")
    ] = None,
    config: ConfigFile = DEFAULT_CONFIG,
    url: ServerUrl = None,
    key_file: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Make a key, and show it this once: only its hash is kept."""
    from ..log.keys import KeyLimits, KeyRequest, seconds
    from ..operate.commands import create_key

    wanted = KeyRequest(
        name=name,
        scopes=_scopes(scope or ["cdc:read"]),
        tables=tuple(glob.strip() for text in tables or () for glob in text.split(",")),
        tenant=tenant,
        limits=KeyLimits(connections, requests_per_second, events_per_second),
        seconds=None if expires is None else seconds(expires),
    )
    _show(create_key(configured(config, url, key_file), wanted), as_json=as_json)


@app.command("list")
def list_keys(
    config: ConfigFile = DEFAULT_CONFIG,
    url: ServerUrl = None,
    key_file: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """List every key, also those that have ended; a key itself is never shown again."""
    import msgspec

    from ..operate.commands import list_keys as listing
    from ..operate.show import key_lines

    found = listing(configured(config, url, key_file))
    if as_json:
        typer.echo(msgspec.json.encode(found))
    else:
        for line in key_lines(found):
            typer.echo(line)


@app.command()
def revoke(
    id: KeyId,
    config: ConfigFile = DEFAULT_CONFIG,
    url: ServerUrl = None,
    key_file: KeyFile = None,
) -> None:
    """End a key now, with every stream that lives by it."""
    from ..operate.commands import revoke_key

    revoked = revoke_key(configured(config, url, key_file), id)
    typer.echo(f"{revoked.id} {revoked.name}".strip() + f" is {revoked.state}")


@app.command()
def rotate(
    id: KeyId,
    overlap: Annotated[
        str, typer.Option(help="How long the old key stays valid: 1h, 0s.", metavar="AGE")
    ] = "1h",
    config: ConfigFile = DEFAULT_CONFIG,
    url: ServerUrl = None,
    key_file: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Make a key with the rights of another, which stays valid for a while."""
    from ..log.keys import seconds
    from ..operate.commands import rotate_key

    _show(
        rotate_key(configured(config, url, key_file), id, overlap=seconds(overlap)), as_json=as_json
    )


def _show(shown: "KeyShown", *, as_json: bool) -> None:
    import msgspec

    if as_json:
        typer.echo(msgspec.json.encode(shown))
        return
    typer.echo(shown.secret)
    typer.echo(f"This is {shown.key.id}; keep it now, it is not shown again.", err=True)


def _scopes(names: list[str]) -> "frozenset[Scope]":
    from ..log.keys import Scope

    known = [scope.value for scope in Scope]
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"no scope called {name!r}; there are: {', '.join(known)}.")
    return frozenset(map(Scope, names))
