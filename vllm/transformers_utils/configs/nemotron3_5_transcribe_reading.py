# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Reading a JSON config so that every complaint names the key in full."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import Field, field, fields
from typing import Any, TypeVar

_T = TypeVar("_T")


def spell_value(value: Any) -> str:
    """Show a value in an error message; JSON can hold whole weight lists."""
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


class ConfigSection:
    """A JSON object that knows where it stands in the file.

    Args:
        values: The parsed object; None is an absent one.
        path: Dotted path of the object, empty for the file itself.

    Raises:
        TypeError: `values` is not an object.
    """

    def __init__(self, values: Any, path: str = "") -> None:
        self.path = path
        if values is None:
            values = {}
        if not isinstance(values, Mapping):
            raise TypeError(f"`{path}` must be an object, got {spell_value(values)}")
        self.values = values

    def name(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def get(self, key: str) -> Any:
        """The value, None when it is absent or null: NeMo writes unset keys."""
        return self.values.get(key)

    def section(self, key: str) -> "ConfigSection":
        return ConfigSection(self.get(key), self.name(key))

    def fail(self, key: str, problem: str) -> ValueError:
        return ValueError(
            f"`{self.name(key)}` {problem}, got {spell_value(self.get(key))}"
        )

    def wrong_type(self, key: str, kind: str) -> TypeError:
        return TypeError(
            f"`{self.name(key)}` must be {kind}, got {spell_value(self.get(key))}"
        )

    def boolean(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong_type(key, "true or false")
        return value

    def number(
        self,
        key: str,
        default: _T,
        low: float | None = None,
        high: float | None = None,
    ) -> _T:
        """A number of the default's kind, within `low` and `high` (inclusive)."""
        value = self.get(key)
        if value is None:
            return default
        whole = isinstance(default, int)
        if isinstance(value, bool) or not isinstance(
            value, int if whole else (int, float)
        ):
            kind = "an integer" if whole else "a number"
            raise self.wrong_type(key, kind)
        if not math.isfinite(value):
            raise self.fail(key, "must be finite")
        if low is not None and value < low:
            raise self.fail(key, f"must be at least {low}")
        if high is not None and value > high:
            raise self.fail(key, f"must be at most {high}")
        return value if whole else float(value)  # type: ignore[return-value]

    def text(self, key: str, default: str | None) -> str | None:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.wrong_type(key, "a string")
        return value

    def only(self, key: str, *supported: Any) -> None:
        """Refuse a value that the model has no implementation for."""
        value = self.get(key)
        # `0 == False`, but not in JSON.
        if value is not None and not any(
            value == other and isinstance(value, bool) == isinstance(other, bool)
            for other in supported
        ):
            names = " or ".join(spell_value(other) for other in supported)
            raise self.fail(key, f"is supported as {names} only")

    def not_null(self, key: str) -> None:
        """Refuse null where NeMo takes it for a setting of its own."""
        if key in self.values and self.values[key] is None:
            raise self.fail(key, "must not be null")

    def equal(self, key: str, expected: int, other: str) -> None:
        """Check an integer that repeats the key `other` of value `expected`."""
        value = self.number(key, expected)
        if value != expected:
            raise ValueError(
                f"`{self.name(key)}` ({value}) must equal `{other}` ({expected})"
            )

    def one_of(self, keys: Iterable[str]) -> str | None:
        """The one key given among several spellings.

        Raises:
            ValueError: Two of them are given with different values.
        """
        given = [key for key in keys if self.get(key) is not None]
        for other in given[1:]:
            if self.get(other) != self.get(given[0]):
                raise ValueError(
                    f"`{self.name(given[0])}` ({spell_value(self.get(given[0]))}) and "
                    f"`{self.name(other)}` ({spell_value(self.get(other))}) disagree"
                )
        return given[0] if given else None


def keyed(
    key: str, default: Any, *, low: float | None = None, high: float | None = None
) -> Any:
    """A dataclass field read from NeMo's `key`, of the kind of its default."""
    return field(default=default, metadata={"key": key, "low": low, "high": high})


def _keyed_fields(cls: Any) -> Iterable[Field]:
    return (entry for entry in fields(cls) if "key" in entry.metadata)


def read_fields(defaults: Any, section: ConfigSection) -> dict[str, Any]:
    """Values of a dataclass's keyed fields; `defaults` is an instance of it."""
    values = {}
    for entry in _keyed_fields(defaults):
        key = entry.metadata["key"]
        default = getattr(defaults, entry.name)
        if isinstance(default, bool):
            values[entry.name] = section.boolean(key, default)
        else:
            values[entry.name] = section.number(
                key, default, entry.metadata["low"], entry.metadata["high"]
            )
    return values


def write_fields(config: Any) -> dict[str, Any]:
    """The inverse of :func:`read_fields`."""
    return {
        entry.metadata["key"]: getattr(config, entry.name)
        for entry in _keyed_fields(config)
    }


def merge_json(base: Mapping[str, Any], over: Any) -> Any:
    """Lay `over` over `base`, object by object; a null leaves the base's value."""
    if not isinstance(over, Mapping):
        return over
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        if isinstance(below, Mapping):
            merged[key] = below if value is None else merge_json(below, value)
        elif value is not None or key not in merged:
            merged[key] = value
    return merged
