"""The command line: one module per verb, imported only when that verb is used."""
