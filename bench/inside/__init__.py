"""`baton bench steps`, `phases`, `perplexity` and `handoff`: the engine looked at from inside, without a server.

Where the rest of `bench` knows servers by their API only, these commands call what a worker is made of, so that what
is slow can be told apart from what is beside it. Each measures its repeats, shows medians, and writes every sample
with `--json`.
"""
