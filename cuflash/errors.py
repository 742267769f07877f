"""The one exception of the package."""


class CuflashError(ValueError):
    """Bad input, or a problem no kernel takes. Worded *what; got; needs; do*; raised before anything runs."""
