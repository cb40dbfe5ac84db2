"""The process that runs untrusted programs for `envgym.sandbox`, and what it shuts them into.

It is started as `jail` with nothing of envgym on its path, and imports only light parts of the standard library: it
forks for every program, so what it holds is what a program could at worst get to see.

    sandbox.py (envgym)
      -> server      one process a sandbox: takes requests
           -> supervisor   one a program: enforces the limits, reports
                -> init    process 1 of the program's own process namespace
                     -> the program
"""
