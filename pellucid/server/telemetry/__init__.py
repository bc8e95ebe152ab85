"""What operators see: metrics, logs, traces, and what the service manager is told."""
