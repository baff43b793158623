"""The JSON schema of the config, for editors: fields, "auto", comments, and DeepSpeed's keys."""

import json
from typing import Any, Literal

from pydantic import create_model
from pydantic.json_schema import models_json_schema

from ...configs.section import Section
from ...optimizers import OPTIMIZERS
from .batch import BATCH_KEYS
from .config import Config
from .read import OR_NEVER
from .scheduler import SCHEDULER_PARAMS
from .translate import ALIASES, AUTO, NULL_IS_DEFAULT, PLANNED, deepspeed, sections_of

_COMMENTS: dict[str, dict[str, str]] = {r"^(_|//|\$schema$)": {}}


def schema_text() -> str:
    """Return the text of configs/schema.json."""
    return json.dumps(json_schema(), indent=2) + "\n"


def json_schema() -> dict[str, Any]:
    """Return the schema of `Config.load`, as far as JSON schema can express it (no batch equation, no conflicts)."""
    schema: dict[str, Any] = _standard_limits(_with_types(Config.model_json_schema()))
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "lowtide config"
    definitions = schema["$defs"]
    for key in ("optimizer", "scheduler"):
        _open_type_names(schema, key)
    deepspeed().add_to_schema(schema)
    for definition in [schema, *definitions.values()]:
        definition["patternProperties"] = _COMMENTS
    # Before the aliases: an alias takes the values that its key takes by then.
    for path in [*NULL_IS_DEFAULT, *OR_NEVER]:
        allow(schema, path, {"type": "null"})
    for path in [*AUTO, *BATCH_KEYS, *PLANNED]:
        allow(schema, path, {"const": "auto"})
    for size in ({"const": "auto"}, {"type": "integer", "minimum": 0}):
        allow(schema, "tiles", size)
    for alias, path in ALIASES.items():
        for properties in _properties(schema, alias):
            properties[alias.rpartition(".")[2]] = properties[path.rpartition(".")[2]]
    return schema


def _with_types(schema: dict[str, Any]) -> dict[str, Any]:
    """Replace the optimizer and scheduler sections by a section for each type."""
    definitions = schema["$defs"]
    # Pydantic knows only the base class of `params`, without the keys of any type.
    for name in ("OptimizerConfig", "SchedulerConfig", "Section"):
        del definitions[name]
    optimizers = [_section_of(one.title, one.name, one.params, "Optimizer") for one in OPTIMIZERS.values()]
    schedulers = [_section_of(name, name, params, "Scheduler") for name, params in SCHEDULER_PARAMS.items()]
    _, made = models_json_schema([(model, "validation") for model in (*optimizers, *schedulers)])
    for key, models in (("optimizer", optimizers), ("scheduler", schedulers)):
        choice = schema["properties"][key]
        choice["anyOf"][0] = {"oneOf": [{"$ref": f"#/$defs/{model.__name__}"} for model in models]}
        choice["title"] = key.title()
    return schema | {"$defs": dict(sorted((definitions | made["$defs"]).items()))}


def _section_of(title: str, name: str, params: type[Section], kind: str) -> type[Section]:
    is_given = any(field.is_required() for field in params.model_fields.values())
    fields: dict[str, Any] = {"type": (Literal[name], name), "params": (params, ... if is_given else params())}
    return create_model(f"{title[0].upper()}{title[1:]}{kind}", __base__=Section, __doc__=f"{title}.", **fields)


def _standard_limits(schema: Any) -> Any:
    """Rename limits to the standard's names, since pydantic does not if null is also allowed."""
    names = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
    if isinstance(schema, dict):
        return {names.get(key, key): _standard_limits(value) for key, value in schema.items()}
    return [_standard_limits(item) for item in schema] if isinstance(schema, list) else schema


def _properties(schema: dict[str, Any], path: str) -> list[dict[str, Any]]:
    """Return the `properties` that hold the last key of a path: several if the type of a section decides."""
    section = path.rpartition(".")[0]
    definitions = schema["$defs"]
    if section == "":
        return [schema["properties"]]
    own = sections_of(Config).get(section)
    names = [] if own is None else [own.__name__]
    if own is None:
        kind, _, params = section.partition(".")
        refs = [item["$ref"].rpartition("/")[2] for item in schema["properties"][kind]["anyOf"] if "$ref" in item]
        names = [_params_of(definitions[ref]) for ref in refs] if params else refs
    # Types can share the class of their params ("linear" and "cosine" do): each class is changed once.
    return [definitions[name]["properties"] for name in dict.fromkeys(names)]


def _params_of(definition: dict[str, Any]) -> str:
    return str(definition["properties"]["params"]["$ref"].rpartition("/")[2])


def add(schema: dict[str, Any], path: str, value: dict[str, Any]) -> None:
    for properties in _properties(schema, path):
        properties[path.rpartition(".")[2]] = value


def allow(schema: dict[str, Any], path: str, other: dict[str, Any]) -> None:
    """Let the key at `path` also take values that `other` describes."""
    key = path.rpartition(".")[2]
    for properties in _properties(schema, path):
        if key in properties and other not in properties[key].get("anyOf", []):
            # These describe the key, whatever form its value has, so they stay beside `anyOf`.
            outside = {
                name: properties[key].pop(name)
                for name in ("description", "title", "default")
                if name in properties[key]
            }
            properties[key] = {"anyOf": [properties[key], other], **outside}


def _open_type_names(schema: dict[str, Any], key: str) -> None:
    """Accept type names in any case and in all spellings."""
    choice = schema["properties"][key]["anyOf"][0]
    choices = choice.pop("oneOf")
    schema["properties"][key]["anyOf"] = [*choices, {"type": "null"}]
    for item in choices:
        section = schema["$defs"][item["$ref"].rpartition("/")[2]]
        properties = section["properties"]
        name = properties["type"]["const"]
        others = {"adamw": ("adam", "adamw")}.get(name, (name,))  # "Adam" means AdamW unless adam_w_mode is false
        spellings = [word for other in others if other in OPTIMIZERS for word in OPTIMIZERS[other].deepspeed_names]
        names = [name, *spellings, *others]
        # JSON schema has no flag for case, so the pattern spells both cases of each letter.
        pattern = "|".join("".join(f"[{c.lower()}{c.upper()}]" for c in other) for other in dict.fromkeys(names))
        properties["type"] = {"type": "string", "pattern": f"^({pattern})$", "default": name}
        if name in ("adam", "adamw"):
            # No field, since it chooses the type: see `canonical_optimizer`.
            params = schema["$defs"][_params_of(section)]["properties"]
            params["adam_w_mode"] = {
                "type": "boolean",
                "default": True,
                "description": 'false: type "Adam" is Adam with an L2 penalty in the gradient.',
            }
        if name == "adam":
            of_adam = 'Adam with an L2 penalty in the gradient: type "Adam" with `adam_w_mode` false.'
            section["description"] = of_adam
