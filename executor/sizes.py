"""Numbers of bytes as people read them, in sentences and progress lines. The exact ones are for logs and messages."""

from __future__ import annotations


def format_bytes(size: int) -> str:
    """ "1.5 GiB", to four digits."""
    value, units = float(size), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.4g} {units[0]}"
