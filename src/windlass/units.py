"""The only formatter: bytes, counts, rates, durations. 1 GiB = 2**30 bytes; 1 G (tokens, FLOP) = 1e9."""

import math

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def format_bytes(num_bytes: float) -> str:
    """1536 -> '1.5 KiB'. Binary units, because memory is sold and allocated in them."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def format_count(count: float, is_fixed: bool = False) -> str:
    """1_543_714_304 -> '1.54 G'. Decimal units, for tokens, parameters, FLOPs. `is_fixed`: always three digits."""
    value = float(count)
    for unit in ("", " k", " M", " G", " T", " P"):
        if abs(value) < 999.5:  # what rounds to 1000 goes to the next unit
            return f"{value:.0f}" if unit == "" else f"{three_digits(value) if is_fixed else f'{value:.3g}'}{unit}"
        value /= 1000
    return f"{value:.3g} E"


def counted(number: int, noun: str, form: str = "d") -> str:
    """'1 document', '2 documents', '2 batches'."""
    ending = "es" if noun.endswith("ch") else "s"
    return f"{number:{form}} {noun}{'' if number == 1 else ending}"


def three_digits(value: float) -> str:
    """0.57 -> '0.570'; 14 -> '14.0'; 123.4 -> '123'."""
    return f"{value:#.3g}".rstrip(".")


def format_duration(seconds: float) -> str:
    """3725 -> '1h02m'; 75 -> '1m15s'; 0.42 -> '0.42s'; a non-finite value -> 'n/a'."""
    if not math.isfinite(seconds):
        return "n/a"
    if seconds < 10:
        return f"{seconds:.2f}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes == 0:
        return f"{rest}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s"


def perplexity(nats: float) -> float | None:
    """exp(nats), or None where that overflows or the loss is not finite (JSON has no inf)."""
    return math.exp(nats) if nats < 700 else None


def bits_per_byte(nats_sum: float, num_bytes: int) -> float | None:
    """Summed nats over the text's bytes, in bits per byte: the one figure that compares across vocabularies."""
    return nats_sum / (math.log(2) * num_bytes) if num_bytes else None
