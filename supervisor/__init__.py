"""The daemon: lease, generations, planner, slots, queues, policy and store. Links no engine."""
