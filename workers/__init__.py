"""Worker processes: one engine each, knowing nothing of leases, clients, policy or gRPC."""
