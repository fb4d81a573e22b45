"""Headrace: change data capture for Python and Spark.

database -> sources -> capture -> log -+-> serve     HTTP long poll, SSE
                                       +-> pipeline  Spark (to come)
"""

__version__ = "0.1.0"
