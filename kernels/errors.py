"""What goes wrong with ops before there are any."""


class NoOps(Exception):
    """Ops of this kind cannot be had here, or cannot do what is asked of them."""
