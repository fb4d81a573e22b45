"""What the sinks that write Delta tables share: storage, files, commits."""
