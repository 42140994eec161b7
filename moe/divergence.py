"""What training and sampling raise when the numbers are no longer numbers."""


class Diverged(ValueError):
    """A loss, a gradient or a log-probability is not finite; the message says what to lower or to go back to."""
