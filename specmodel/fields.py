"""The types of a calibration's fields: what kind of value each takes, and its range.

Ranges are `annotated_types` metadata. How strictly a value is read is metadata that the validator of `specmodel.schema`
asks for its part of the schema, by the protocol that pydantic defines for it; pydantic itself is not needed here.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from annotated_types import Ge, Gt, Le, Len

# Largest whole number that a file may state: beyond any count or size in bytes, and exact as a double.
MAX_INTEGER = 10**15
# What times, speeds and other numbers lie between: beyond any measurement, and near enough that quotients and powers
# of them are numbers.
LEAST_NUMBER, MOST_NUMBER = 1e-15, 1e15


class _Strict:
    """Metadata for the validator: no text for a number, no number for a flag."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        schema = handler(source)
        schema["strict"] = True
        return schema


class _NotNull:
    """Metadata for the validator: the key may be absent, but not null."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        return handler(source)["schema"]


class _Matching:
    """Metadata for the validator: text that a pattern is found in."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        return {"type": "str", "strict": True, "pattern": self.pattern}


# not blank, no line break and no other control character
_ONE_LINE = _Matching(r"^[^\x00-\x08\x0a-\x1f\x7f]*[^\s\x00-\x1f\x7f][^\x00-\x08\x0a-\x1f\x7f]*$")
_NOT_BLANK = _Matching(r"\S")
_FILE_SAFE = _Matching(r"^[A-Za-z0-9][A-Za-z0-9._-]*$")


class _IsoDate:
    """Metadata for the validator: a date, or YYYY-MM-DD as JSON and YAML 1.2 state it."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        function = {"type": "no-info", "function": self.read}
        return {"type": "function-before", "function": function, "schema": {"type": "date", "strict": True}}

    @staticmethod
    def read(value: Any) -> Any:
        if isinstance(value, str) and re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", value):
            return datetime.date.fromisoformat(value)
        if isinstance(value, datetime.datetime) or not isinstance(value, datetime.date):
            raise ValueError("not a date")
        return value


_T = TypeVar("_T")
Maybe = Annotated[_T | None, _NotNull()]

Count = Annotated[int, _Strict(), Ge(1), Le(MAX_INTEGER)]
NonNegativeInt = Annotated[int, _Strict(), Ge(0), Le(MAX_INTEGER)]
Number = Annotated[float, _Strict()]
Positive = Annotated[Number, Gt(LEAST_NUMBER), Le(MOST_NUMBER)]
NonNegative = Annotated[Number, Ge(0), Le(MOST_NUMBER)]
Probability = Annotated[Number, Ge(0), Le(1)]
AtLeastOne = Annotated[Number, Ge(1), Le(MOST_NUMBER)]
Flag = Annotated[bool, _Strict()]
Range = tuple[Positive, Positive]
Text = Annotated[str, _ONE_LINE]
Paragraph = Annotated[str, _NOT_BLANK]
Date = Annotated[datetime.date, _IsoDate()]
Name = Text
EnvironmentValue = Annotated[str, _Strict()]
FactValue = Flag | Annotated[int, _Strict(), Ge(-MAX_INTEGER), Le(MAX_INTEGER)] | Number | Annotated[str, _Strict()]
FileSafeName = Annotated[str, _FILE_SAFE]
Counts = Annotated[tuple[NonNegativeInt, ...], Len(1)]
CountsByRank = Annotated[tuple[Counts, ...], Len(1)]
Increasing = Annotated[tuple[Count, ...], Len(1)]  # that it increases is a rule of `specmodel.invariants`
Probabilities = Annotated[tuple[Probability, ...], Len(1)]
Method = Literal["eagle3", "eagle", "mtp", "draft_model", "ngram", "parallel", "none"]
GraphScope = Literal["step", "cycle"]
