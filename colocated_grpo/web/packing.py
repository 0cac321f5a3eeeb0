"""gzip from anybody: a kilobyte of it can stand for a megabyte."""

import zlib


class TooLarge(Exception):
    """More bytes than anybody wants to hold."""


def unpack(packed: bytes, most: int) -> bytes:
    """Raises TooLarge above `most` bytes, zlib.error where it is broken or cut off."""
    unpacker = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    body = unpacker.decompress(packed, most + 1)
    if len(body) > most:
        raise TooLarge
    if not unpacker.eof:
        raise zlib.error("cut off")
    return body
