"""Bounded gzip decompression: one kilobyte of gzip can expand to a megabyte.

A separate module, so that the client needs no web framework.
"""

import zlib


class TooLarge(Exception):
    """The decompressed body exceeds the limit."""


def gunzip(compressed: bytes, max_bytes: int) -> bytes:
    """Decompress one gzip member. Raises TooLarge above `max_bytes`, zlib.error for corrupt or truncated data."""
    decompressor = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    body = decompressor.decompress(compressed, max_bytes + 1)
    if len(body) > max_bytes:
        raise TooLarge
    if not decompressor.eof:
        raise zlib.error("truncated gzip data")
    return body
