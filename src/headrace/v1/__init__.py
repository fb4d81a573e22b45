"""The changefeed's messages over gRPC; all but the `.proto` is written by `make protos`."""
