"""How keys and values are stored: a file a codec, and the schemes that say which layer takes which. Knows no rows."""

from mantou.kv.codecs.affine import Affine
from mantou.kv.codecs.native import Native, Nothing
from mantou.kv.codecs.schemes import SCHEMES, InRecords, Uniform, make_scheme
from mantou.kv.codecs.turbo import Codebook, Rotated

__all__ = [
    "SCHEMES",
    "Affine",
    "Codebook",
    "InRecords",
    "Native",
    "Nothing",
    "Rotated",
    "Uniform",
    "make_scheme",
]
