"""What holds for every test, set before anything is imported that reads it."""

import os

# Threads of two processes that spin for each other on the same cores cost minutes, and no test needs the second one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
