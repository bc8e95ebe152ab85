"""What runs inside the tracer's child process, in the engine's environment: standard library only at the top.

Nothing here imports the rest of the package, which need not be installed there. Started by `tracer.sandbox`.
"""
