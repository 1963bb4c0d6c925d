"""What each key means, read off the schema: for error messages and for `docs/configuration.md`.

`python -m mempo_ray.config.reference > docs/configuration.md` writes the page again.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from mempo_ray.config.schema import Config, Section

_WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", Any: "anything"}
_SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


@cache
def fields() -> Mapping[str, FieldInfo]:
    """Every dotted key, sections included, in the order of the schema. `<name>` stands for one that the user gives."""
    found: dict[str, FieldInfo] = {}

    def walk(section: type[Section], prefix: str) -> None:
        for name, field in section.model_fields.items():
            found[prefix + name] = field
            if inner := section_of(field):
                walk(inner, f"{prefix}{name}.<name>." if get_origin(field.annotation) is dict else f"{prefix}{name}.")

    walk(Config, "")
    return found


def known_as(key: str) -> str | None:
    """The key of `fields` that a user's key goes by, or None.

    Example: `reward.styles.judge.weight` is `reward.styles.<name>.weight`; `reward.tool_weights.python` is
    `reward.tool_weights`, whose names are the user's.
    """
    parts, known = key.split("."), ""
    for part in parts:
        options = [f"{known}.{part}".lstrip("."), f"{known}.<name>"]
        found = next((option for option in options if option in fields() or _holds(option)), None)
        if found is None:
            return known if known in fields() and _has_free_names(fields()[known]) else None
        known = found
    return known if known in fields() else known.removesuffix(".<name>")


def _holds(prefix: str) -> bool:
    return any(known.startswith(f"{prefix}.") for known in fields())


def _has_free_names(field: FieldInfo) -> bool:
    return get_origin(field.annotation) is dict and section_of(field) is None


def section_of(field: FieldInfo) -> type[Section] | None:
    """The section that a field holds (`X` or `X | None`), or None for a leaf."""
    for option in (field.annotation, *get_args(field.annotation)):
        if isinstance(option, type) and issubclass(option, Section):
            return option
    return None


def expected(key: str) -> str:
    """What a key takes, in words: 'a whole number ≥ 1', 'one of: last_turn, full'."""
    field = fields().get(known_as(key) or "")
    if field is None:
        return "another value"
    if inner := section_of(field):
        return f"a section with keys such as {', '.join(list(inner.model_fields)[:4])}"
    limits = [f"{sign} {limit:g}" for m in field.metadata for name, sign in _SIGNS.items()
              if (limit := getattr(m, name, None)) is not None]  # fmt: skip
    return " and ".join([" ".join([_type_words(field.annotation), *limits[:1]]), *limits[1:]])


def _type_words(annotation: Any) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type_words(args[0])
    if origin is Literal:
        return "one of: " + ", ".join(str(a) for a in args)
    if origin is dict:
        return f"{_type_words(args[1])} by name"
    if origin is tuple:
        return "a list of texts" if str in args else "a list of two numbers"
    if origin in (Union, types.UnionType):
        return " or ".join("nothing" if a is type(None) else _type_words(a) for a in args)
    return _WORDS.get(annotation, str(annotation))


def markdown() -> str:
    """The page `docs/configuration.md`: one table a section."""
    lines = [
        "# Configuration",
        "",
        "Made from `mempo_ray/config/schema.py` by `python -m mempo_ray.config.reference`; a test compares them.",
        "A run is a YAML file with these sections; `key.sub=value` on the command line comes on top, and",
        "`${oc.env:VAR,default}` reads the environment. An unknown key is refused, with the nearest known one.",
    ]
    top = {key: field for key, field in fields().items() if "." not in key and section_of(field) is None}
    lines += ["", "## Top level", "", *_table(top)]
    for key, field in fields().items():
        inner = section_of(field)
        if inner is None:
            continue
        inside = f"{key}.<name>" if get_origin(field.annotation) is dict else key
        own = {k: f for k, f in fields().items() if k.rpartition(".")[0] == inside and section_of(f) is None}
        lines += ["", f"## {inside}", ""]
        if inner.__doc__ and inner.__doc__ != Section.__doc__:
            lines += [inner.__doc__.strip(), ""]
        lines += _table(own)
    return "\n".join(lines) + "\n"


def _table(rows: Mapping[str, FieldInfo]) -> list[str]:
    head = ["| key | takes | default | meaning |", "|---|---|---|---|"]
    return head + [
        "| "
        + " | ".join(
            cell.replace("|", "\\|").replace("\n", " ")
            for cell in (f"`{key}`", expected(key), _default(field), field.description or "")
        )
        + " |"
        for key, field in rows.items()
    ]


def _default(field: FieldInfo) -> str:
    value = field.default
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return f"`[{', '.join(str(v) for v in value)}]`"
    return f'`"{value}"`' if value == "" else f"`{value}`"


if __name__ == "__main__":
    print(markdown(), end="")
