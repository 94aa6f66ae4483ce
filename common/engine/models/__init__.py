"""One file per model family that really differs."""
