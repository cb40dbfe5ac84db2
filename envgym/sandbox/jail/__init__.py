"""The process that runs untrusted programs for `envgym.sandbox`, and their isolation.

It is started as `jail` without envgym on its path, and imports only light parts of the standard library: it forks for
every program, so a program could at worst read the server's memory.

    sandbox.py (envgym)
      -> server      one process per sandbox: takes requests
           -> supervisor   one per program: enforces the limits, reports
                -> init    process 1 of the program's own process namespace
                     -> the program
"""
