"""What a machine has and lacks for serving a model, before weights are read. Called by `pellucid doctor`."""
