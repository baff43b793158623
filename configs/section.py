"""The base class and the number types of every config section."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    create_model,
)
from pydantic_core import PydanticCustomError

Dtype = Literal["fp32", "bf16", "fp16"]
# torch's sizes and seeds are int64.
MAX_INTEGER = 2**63 - 1


class Section(BaseModel):
    """A part of the config: closed (an unknown key is an error) and frozen.

    A field whose JSON key is no Python name has the key as its alias: read and written under that name alone.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, serialize_by_alias=True)

    @classmethod
    def json_keys(cls) -> list[str]:
        """The keys of this section as they stand in a file."""
        return [field.alias or name for name, field in cls.model_fields.items()]


Key = tuple[Any, Any, str]
"""A key of a section: its type, its default (...: required), and its description."""


def section_of(name: str, text: str, keys: Mapping[str, Key]) -> type[Section]:
    """Make the class of a section from a table of its keys. text: its docstring."""
    fields: dict[str, Any] = {
        key: (kind, Field(default, description=said)) for key, (kind, default, said) in keys.items()
    }
    return create_model(name, __base__=Section, __doc__=text, **fields)


def _integer(value: object) -> object:
    """The value as an int. 5e8 is an integer, true and "5" are not."""
    # Before the check of the type: YAML and many templates write 500000000 as 5e8, and JSON reads that as a float.
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    # bool is a subclass of int, and pydantic's int would take true and "5".
    if isinstance(value, bool) or not isinstance(value, int):
        raise PydanticCustomError("int_type", "expected an integer")
    if abs(value) > MAX_INTEGER:
        raise PydanticCustomError("int_size", "expected an integer of at most 64 bits")
    return value


def _number(value: object) -> object:
    """The value unchanged if it is an int or a float. true and "0.1" are not numbers."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise PydanticCustomError("float_type", "expected a number")
    return value


def _folder(value: object) -> object:
    """The value unchanged if it is null or a path that is not blank."""
    if value is not None and (not isinstance(value, str) or not value.strip() or value == "auto" or "\0" in value):
        kind = "value_error" if isinstance(value, str) else "string_type"
        raise PydanticCustomError(kind, "expected the path of a folder or null")
    return value


def worded(words: str) -> WrapValidator:
    """Describe every fault of a value by these words: pydantic lists a fault for each type of a union."""

    def check(value: object, validate: ValidatorFunctionWrapHandler) -> object:
        try:
            return validate(value)
        except ValidationError:
            # The inner faults name branches of a union that the user did not mean.
            raise PydanticCustomError("value_error", words) from None

    return WrapValidator(check)


Bool = StrictBool
Int = Annotated[int, BeforeValidator(_integer)]
Float = Annotated[float, BeforeValidator(_number)]
Natural = Annotated[Int, Field(ge=0)]
Positive = Annotated[Int, Field(ge=1)]
NonNegative = Annotated[Float, Field(ge=0)]
Patterns = Annotated[
    Literal["auto"] | Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)],
    worded('expected "auto" or a list of patterns of module names'),
]
Folder = Annotated[str | None, BeforeValidator(_folder), Field(json_schema_extra={"minLength": 1})]
