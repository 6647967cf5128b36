"""A dictionary of structured field values (RFC 9651), as far as the lifecycle header needs one."""

from collections.abc import Mapping


class Token(str):
    """A bare word, without quotes."""

    __slots__ = ()


def dictionary(members: Mapping[str, "str | int | float | bool"]) -> str:
    """One header value of printable ASCII. Text is a string, or a display string where ASCII does not do;
    a true boolean stands alone; a float is rounded to a thousandth."""
    return ", ".join(name if value is True else f"{name}={_item(value)}" for name, value in members.items())


def _item(value: "str | int | float | bool") -> str:
    if isinstance(value, Token):
        return str(value)
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, bool):
        return "?1" if value else "?0"
    if isinstance(value, int):
        return str(value)
    return f"{value:.3f}"


def _text(text: str) -> str:
    if text.isascii():
        escaped = text.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    encoded = "".join(
        chr(byte) if 0x20 <= byte <= 0x7E and byte not in b'%"' else f"%{byte:02x}"
        for byte in text.encode("utf-8", "replace")
    )
    return f'%"{encoded}"'
