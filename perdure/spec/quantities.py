"""Amounts of resources, as Kubernetes writes them: in the specification a text, in decisions a number."""

from __future__ import annotations

from decimal import ROUND_CEILING, Decimal
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, TypeAdapter, ValidationError

from .base import Quantity

__all__ = ["Amount", "amount", "bytes_of", "is_quantity", "quantity_of_bytes"]

_SUFFIXES: Final = {
    "m": Decimal("0.001"),
    **{unit: Decimal(1000) ** power for power, unit in enumerate("kMGTPE", 1)},
    **{f"{unit}i": Decimal(1024) ** power for power, unit in enumerate("KMGTPE", 1)},
}
_BINARY: Final = ("Ti", "Gi", "Mi", "Ki")


def _number_to_text(value: Any) -> Any:
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


Amount = Annotated[Quantity, BeforeValidator(_number_to_text, json_schema_input_type=Quantity | int | float)]
"""A quantity that may be written as a number."""


_QUANTITIES: Final[TypeAdapter[str]] = TypeAdapter(Quantity)


def is_quantity(text: str) -> bool:
    """Returns whether a text is an amount as Kubernetes writes it."""
    try:
        _QUANTITIES.validate_python(text)
    except ValidationError:
        return False
    return True


def amount(quantity: str) -> Decimal:
    """Returns the number of a quantity of the specification, such as 500m or 64Gi."""
    digits = quantity.rstrip("kKMGTPEim")
    unit = quantity[len(digits) :]
    return Decimal(digits) * _SUFFIXES[unit] if unit else Decimal(digits)


def bytes_of(quantity: str) -> int:
    """Returns a quantity of memory in whole bytes; a part of a byte counts as one."""
    return int(amount(quantity).to_integral_value(ROUND_CEILING))


def quantity_of_bytes(number: int) -> str:
    """Returns the shortest quantity that is exactly this number of bytes, such as 24Gi."""
    for unit in _BINARY:
        if number and number % int(_SUFFIXES[unit]) == 0:
            return f"{number // int(_SUFFIXES[unit])}{unit}"
    return str(number)
