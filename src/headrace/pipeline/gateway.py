"""The Java process of a pipeline: started without a setting in the list of processes, and closed to
everybody but this process.

Spark's RPC ports, py4j's port and the port of Python's callbacks are open to every user of the
machine. Each of them takes nothing without a secret that only these two processes have.
"""

import os
import secrets
import shlex
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pyspark import SparkConf, SparkContext, java_gateway
from pyspark.errors import PySparkRuntimeError

from ..errors import ConfigError, PipelineError

_LOG_SETTINGS = Path(__file__).with_name("log4j2.properties")
_JVM_SECONDS = 10.0
_SHORTEST_SECRET = 4
_ARGUMENTS = "PYSPARK_SUBMIT_ARGS"
_AUTHENTICATE, _SECRET = "spark.authenticate", "spark.authenticate.secret"

# What the JVM must know when it starts; the rest is set once it runs.
_AT_LAUNCH = ("spark.master", "spark.driver.", "spark.jars", "spark.submit.", "spark.files")
_JAVA_OPTIONS = ("spark.driver.defaultJavaOptions", "spark.driver.extraJavaOptions")


def launched(settings: Mapping[str, str], journal: Path) -> Any:
    """Start Java; what it prints goes beside `journal`, where Spark logs."""
    output = journal.with_suffix(".out")
    output.parent.mkdir(parents=True, exist_ok=True)
    launch: Any = java_gateway.launch_gateway
    with output.open("wb") as file, _submitted(settings, journal):
        try:
            gateway = launch(popen_kwargs={"stdout": file, "stderr": file})
        except PySparkRuntimeError as error:
            raise PipelineError(
                "Spark does not start", hint=f"The output of Java is in {output}."
            ) from error
    _guard_callbacks(gateway)
    return gateway


def authenticated(settings: Mapping[str, str], conf: SparkConf) -> None:
    """See to a secret for Spark's ports; a ConfigError where only the user knows it."""
    if settings[_AUTHENTICATE].lower() != "true":
        return
    master = settings["spark.master"]
    if master.startswith("local"):
        conf.setIfMissing("spark.network.crypto.enabled", "true")
    if conf.contains(_SECRET):
        return
    if master.startswith("local-cluster["):  # it runs within this process
        conf.set(_SECRET, secrets.token_hex(32))
    elif master.startswith("spark://"):
        raise ConfigError(
            f"pipeline.spark: {_SECRET} is missing, without which whoever reaches the ports of "
            f"{master} and of its executors could run code in them",
            hint=f"Set it to the {_SECRET} that the cluster has (with {_AUTHENTICATE}: true in "
            f"every spark-defaults.conf), or set {_AUTHENTICATE} to false where the network lets "
            "nobody else reach them.",
        )
    # For the other masters Spark makes one by itself.


def started(settings: Mapping[str, str], gateway: Any) -> SparkContext:
    """Start Spark in a JVM."""
    conf = SparkConf(loadDefaults=True, _jvm=gateway.jvm).setAll(list(settings.items()))
    authenticated(settings, conf)
    try:
        return SparkContext(conf=conf, gateway=gateway)
    except Exception as error:  # py4j's, or one of many that pyspark makes of it
        reason, *_ = str(getattr(error, "java_exception", error)).splitlines() or [""]
        raise PipelineError(
            f"Spark does not start: {masked(reason, settings)}",
            hint="Check pipeline.master and pipeline.spark.",
        ) from error


def masked(text: str, settings: Mapping[str, str]) -> str:
    """A text of Java's without the values of settings, of which some are secrets.

    The longest first: one value may be the beginning of another.
    """
    values = {value for name, value in settings.items() if name != "spark.master"}
    for value in sorted(values, key=len, reverse=True):
        if len(value) >= _SHORTEST_SECRET:
            text = text.replace(value, "***")
    return text


def end(gateway: Any) -> None:
    """Let the JVM of a session go, and see to it that it went."""
    SparkContext._gateway = SparkContext._jvm = None  # or a later session would ask the dead one
    shut(gateway)


def shut(gateway: Any) -> None:
    """Let a JVM go, and see to it that it went."""
    gateway.shutdown()
    gateway.proc.stdin.close()
    try:
        gateway.proc.wait(_JVM_SECONDS)
    except subprocess.TimeoutExpired:
        gateway.proc.kill()
        gateway.proc.wait()


@contextmanager
def _submitted(settings: Mapping[str, str], journal: Path) -> Iterator[None]:
    """The settings in files that only this user can read, for as long as Java starts."""
    known = {name: value for name, value in settings.items() if name.startswith(_AT_LAUNCH)}
    before = os.environ.get(_ARGUMENTS)
    with tempfile.TemporaryDirectory(prefix="headrace-") as name:  # 0700
        folder = Path(name)
        options = [each for key in _JAVA_OPTIONS for each in shlex.split(known.pop(key, ""))]
        arguments = folder / "java"
        arguments.write_text("".join(_argument(each) for each in options))
        known["spark.driver.extraJavaOptions"] = f"{_ours(journal)} @{arguments}"
        properties = folder / "spark.conf"
        properties.write_text("".join(_property(*each) for each in known.items()))
        files = f"--load-spark-defaults --properties-file {shlex.quote(str(properties))}"
        os.environ[_ARGUMENTS] = f"{files} {before or 'pyspark-shell'}"
        try:
            yield
        finally:
            if before is None:
                del os.environ[_ARGUMENTS]
            else:
                os.environ[_ARGUMENTS] = before


def _ours(journal: Path) -> str:
    return f'-Dlog4j2.configurationFile="{_LOG_SETTINGS.as_uri()}" -Dheadrace.journal="{journal}"'


def _argument(option: str) -> str:
    r"""A line of a file of Java's arguments.

    >>> _argument('-Da=x "y"')
    '"-Da=x \\"y\\""\n'
    """
    escaped = option.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"\n'


def _property(name: str, value: str) -> str:
    r"""A line of a file of Java's properties.

    >>> _property("spark.jars", "a=b\n é")
    'spark.jars=a\\u003db\\u000a\\u0020\\u00e9\n'
    """
    return f"{name}={''.join(map(_escaped, value))}\n"


def _escaped(character: str) -> str:
    if character.isascii() and (character.isalnum() or character in "./-_,"):
        return character
    units = character.encode("utf-16-be")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))


def _guard_callbacks(gateway: Any) -> None:
    """Take calls from this JVM only.

    pyspark opens the port for callbacks without a secret, and py4j's client forgets its own when it
    learns the port.
    """
    secret = gateway.java_parameters.auth_token
    gateway.python_parameters.auth_token = secret
    pyspark: Any = java_gateway
    pyspark.ensure_callback_server_started(gateway)
    server = pyspark.JavaObject("GATEWAY_SERVER", gateway._gateway_client)
    kind = gateway.jvm.java.lang.Class.forName("py4j.CallbackClient")
    field = kind.getDeclaredField("authToken")
    field.setAccessible(True)
    field.set(server.getCallbackClient(), secret)
