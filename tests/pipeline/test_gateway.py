"""What Java is given to start with."""

import pytest

from headrace.errors import ConfigError
from headrace.pipeline.gateway import authenticated, masked
from headrace.sinks.lake.refusal import refusal


class Conf(dict[str, str]):
    """What a SparkConf does, without Java."""

    def contains(self, name: str) -> bool:
        return name in self

    def set(self, name: str, value: str) -> None:
        self[name] = value

    def setIfMissing(self, name: str, value: str) -> None:  # noqa: N802
        self.setdefault(name, value)


def secured(master: str, authenticate: str = "true", **given: str) -> Conf:
    conf = Conf(given)
    settings = {"spark.master": master, "spark.authenticate": authenticate}
    authenticated(settings, conf)  # type: ignore[arg-type]
    return conf


SECRET = "spark.authenticate.secret"


def test_a_cluster_within_the_process_has_a_secret_of_its_own() -> None:
    first, second = (secured("local-cluster[2,1,512]")[SECRET] for _ in range(2))
    assert len(first) == 64
    assert first != second


def test_a_local_master_is_left_to_spark_which_makes_a_secret() -> None:
    assert secured("local[2]") == {"spark.network.crypto.enabled": "true"}


@pytest.mark.requirement("P-40")
def test_a_cluster_whose_secret_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"spark\.authenticate\.secret is missing"):
        secured("spark://host:7077")
    assert secured("spark://host:7077", **{SECRET: "x"}) == {SECRET: "x"}
    assert secured("spark://host:7077", "False") == {}
    assert secured("yarn") == {}


def test_a_secret_that_begins_like_another_value_is_masked_whole() -> None:
    keys = {"access.key": "minio", "secret.key": "minio-4711"}
    assert masked("minio: bad signature of minio-4711", keys) == "***: bad signature of ***"
    assert refusal(ValueError("bad signature of minio-4711"), keys) == "bad signature of ***"
