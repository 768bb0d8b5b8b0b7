"""The ``modeld`` command: thin over the client library and the supervisor."""
