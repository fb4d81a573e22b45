"""A database's changes in Spark, cell by cell: open it as a notebook, or run it as it is."""
# ruff: noqa: T201

# %% [markdown]
# # A database's changes in Spark
#
# `pip install 'headrace[spark]'` is all Spark needs; `headrace run` captures the changes.
#
# Set `HEADRACE_URL` to a running server (such as `http://127.0.0.1:3000`) or `HEADRACE_LOG` to the
# log's folder on this machine, and `HEADRACE_LAKE` to where the tables shall be.

# %%
import os
import sys

import duckdb
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from headrace.model import Model
from headrace.pipeline import apply_changes, as_changelog, entities, rows

URL = os.environ.get("HEADRACE_URL", "")
LOG = os.environ.get("HEADRACE_LOG", "data/log")
LAKE = os.environ.get("HEADRACE_LAKE", "lake")
TABLE = os.environ.get("HEADRACE_TABLE", "public.orders")

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
spark = SparkSession.builder.appName("notebook").getOrCreate()
source = {"url": URL} if URL else {"path": LOG}

# %% [markdown]
# ## What the log holds now
#
# `spark.read` gives what there is, and `spark.readStream` goes on with what comes.

# %%
changes = spark.read.format("headrace").options(**source).load()
kinds = changes.groupBy("schema", "table", "op").count().orderBy("schema", "table", "op")
kinds.show()

# %% [markdown]
# ## One table, typed
#
# The source knows the columns of a table: the newest ones, for all changes. A column that was not
# there yet is null. `where` chooses changes before Spark sees them.

# %%
of_table = spark.read.format("headrace").options(**source).option("table", TABLE)
of_table.option("where", "_change_type <> 'insert'").load().orderBy("_sequence").show()

# %% [markdown]
# `rows` does the same with changes that were read already, for several tables or after a filter.

# %%
typed = rows(changes, TABLE)
typed.orderBy("_sequence").show()

# %% [markdown]
# The same in Spark's own words for change data: an UPDATE is an `update_postimage`, with an
# `update_preimage` before it where the database sent the old row.

# %%
changelog = as_changelog(changes, TABLE)
changelog.groupBy("_change_type").count().orderBy("_change_type").show()

# %% [markdown]
# ## What happened to entities
#
# A row of `orders` is an `Order`, and what a transaction did to it is an event, together with what
# was deleted along with it. A `Model` may give other names, tenants and parents.

# %%
events = entities(changes, Model())
happened = events.groupBy("entity_type", "event_type").count().orderBy("entity_type", "event_type")
happened.show()
events.orderBy("sequence").select("timestamp", "entity_type", "entity_id", "event").show()

# %% [markdown]
# ## Delta tables that equal the database
#
# `availableNow` takes all there is and ends, which suits a timer; without `trigger` the query runs
# on. Started again, it goes on where it was.

# %%
stream = spark.readStream.format("headrace").options(**source).load()
query = apply_changes(
    stream,
    into=LAKE,
    checkpoint=os.path.join(LAKE, "_checkpoint"),
    trigger={"availableNow": True},
)
query.awaitTermination()

# %% [markdown]
# ## Asking the tables
#
# Whatever reads Delta reads them, here DuckDB and Spark SQL, which needs no jar for it.

# %%
table = DeltaTable(os.path.join(LAKE, *TABLE.split(".")))
current = table.scan()
print(duckdb.sql("SELECT count(*) AS rows, max(_sequence) AS last_change FROM current"))

# %%
in_spark = spark.read.format("headrace.tables").option("table", TABLE).load(LAKE)
in_spark.createOrReplaceTempView("current_rows")
spark.sql("SELECT * FROM current_rows ORDER BY _sequence DESC LIMIT 10").show()
