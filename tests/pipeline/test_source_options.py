"""Options are read whole, and refused by name."""

from pathlib import Path

import pytest

from headrace.change.arrow.frame import FIELDS
from headrace.errors import ConfigError
from headrace.pipeline.options import _KNOWN, INTERNAL, Options

LOG = {"path": "/data/log"}


def test_names_are_taken_in_any_case() -> None:
    options = Options.read(
        {
            "URL": "https://shop.example:3000/feed/",
            "apikeyenv": "SHOP_KEY",
            "TABLES": "public.*, orders",
            "columns": "op,sequence",
            "startingSequence": "LATEST",
            "maxchangespertrigger": "10",
            "minPartitions": "8",
            "failOnDataLoss": "False",
        }
    )
    assert options == Options(
        url="https://shop.example:3000/feed",
        api_key_env="SHOP_KEY",
        tables=("public.*", "orders"),
        chosen=("op", "sequence"),
        starting="latest",
        most=10,
        parts=8,
        strict=False,
    )


def test_sequences_are_taken_where_words_are() -> None:
    options = Options.read(LOG | {"startingSequence": "7", "endingSequence": "9"})
    assert (options.starting, options.ending) == (7, 9)


@pytest.mark.parametrize("path", ["data/log", "file:{here}/data/log", "{here}/data/log"])
def test_a_path_means_the_same_to_every_process(path: str) -> None:
    here = Path.cwd()
    assert Options.read({"path": path.format(here=here)}).path == str(here / "data" / "log")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (LOG | {"startingSequnce": "1"}, "did you mean startingSequence"),
        (
            LOG | {"where": "id > 1"},
            "the options source, asText and where go with the option table",
        ),
        (LOG | {"zzz": "1"}, "there is no option 'zzz'; there are: path, url"),
        (LOG | {"apiKey": "cdc_secret"}, "options are shown in query plans"),
        (LOG | {"url": "http://x:1"}, "exactly one of the options path and url"),
        (LOG | {"apiKeyEnv": "KEY"}, "goes with the option url"),
        ({"url": "http://x", "apiKeyEnv": "A", "apiKeyFile": "b"}, "only one of"),
        ({"url": "ftp://x"}, "the option url must be an address"),
        ({"url": "http://x:99999"}, "the option url must be an address"),
        ({"url": "http://me:cdc_secret@x"}, "must hold no user, password"),
        ({"path": ""}, "the option path is empty"),
        (LOG | {"tables": "a,,b"}, "tables must be names between commas"),
        (LOG | {"columns": "op,opp"}, "columns names 'opp'; there are: sequence, id"),
        (LOG | {"columns": "op,op"}, "columns names a column twice"),
        (LOG | {"startingSequence": "first"}, "must be earliest, latest or a sequence"),
        (LOG | {"startingSequence": "0"}, "must be a whole number above 0"),
        (LOG | {"endingSequence": "earliest"}, "endingSequence must be latest or a sequence"),
        (LOG | {"minPartitions": "²"}, "minPartitions must be a whole number above 0"),
        (LOG | {"failOnDataLoss": "maybe"}, "failOnDataLoss must be true or false"),
    ],
)
def test_what_is_wrong_is_named(given: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Options.read(given)
    assert message in str(caught.value)
    assert "cdc_secret" not in caught.value.explain()


def test_every_option_and_every_column_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "spark.md").read_text()
    listed = [line.split("|")[1:3] for line in page.splitlines() if line.startswith("| `")]
    defaults = {names.strip(" `"): default.strip(" `") for names, default in listed}
    named = {name.strip(" `") for names, _ in listed for name in names.split(",")}
    assert {*_KNOWN, *FIELDS} - INTERNAL <= named
    assert not INTERNAL & named
    standard = Options(path="x")
    assert int(defaults["maxChangesPerTrigger"]) == standard.most
    assert int(defaults["minPartitions"]) == standard.parts
    assert defaults["startingSequence"] == standard.starting
    assert defaults["endingSequence"] == standard.ending
    assert defaults["failOnDataLoss"] == str(standard.strict).lower()
