"""gRPC servicers: thin, typed at both ends."""
