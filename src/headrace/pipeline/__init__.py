"""(3b) The log → sinks, on Spark: the source, the transforms, the runner."""
