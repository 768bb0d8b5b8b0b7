"""What runs OpenVINO, in processes of its own: the only place that imports it."""
