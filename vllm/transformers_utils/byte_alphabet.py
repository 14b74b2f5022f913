"""The printable characters in which byte-level tokenizers spell bytes."""


def _build_alphabet() -> dict[str, int]:
    """Map a character to its byte.

    A byte that is a printable Latin-1 character spells itself; the others take the code
    points from 256 on, in their order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return alphabet


CHAR_TO_BYTE = _build_alphabet()
