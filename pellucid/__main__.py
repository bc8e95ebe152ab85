"""`python -m pellucid`: the same as the `pellucid` command."""

from __future__ import annotations

from pellucid.cli.main import main

main()
