"""certvit: prove how robust a vision transformer is, and make it more robust.

Importing this package imports neither torch nor timm; the command line starts at once because of
it.
"""

__version__ = "0.1.0"
