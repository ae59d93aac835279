"""The byte alphabet of GPT-2's BPE: every byte has one printable character of its own."""

from __future__ import annotations

__all__ = ["bytes_of_piece"]

_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))


def _alphabet() -> dict[str, int]:
    """Character to byte: printable Latin-1 stands for itself, the rest moves past U+00FF."""
    others = [byte for byte in range(256) if byte not in _PRINTABLE]
    table = {chr(byte): byte for byte in _PRINTABLE}
    table.update({chr(0x100 + place): byte for place, byte in enumerate(others)})
    return table


_BYTE_OF = _alphabet()


def bytes_of_piece(piece: str) -> bytes:
    """The bytes that a vocabulary entry spells; characters outside the alphabet as UTF-8."""
    try:
        return bytes([_BYTE_OF[char] for char in piece])
    except KeyError:
        # Padding entries such as "[PAD_1]" plus foreign characters: never merged, only named.
        return b"".join(
            bytes([_BYTE_OF[char]]) if char in _BYTE_OF else char.encode() for char in piece
        )
