"""`baton serve`: starts the very commands that one would start by hand, and keeps them running.

1. `plan` turns the options into one command line per process; they meet over sockets in a private folder.
2. `supervisor` starts them (`process`). Each child reports over a `channel`: progress, listening, ready.
3. `policy` decides, without doing I/O, what a death means: restart with back-off, or stop everything.
4. `display` shows the start-up and, when all is ready, the URL and a first request to paste.
5. Ctrl-C or SIGTERM ends the children. So does the supervisor's own death: they see the channel's end.
"""
