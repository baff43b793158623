"""The JSON schema of the config, for editors: the fields, "auto", comments, and DeepSpeed's other keys."""

import json
from typing import Any, Literal

from pydantic import create_model
from pydantic.json_schema import models_json_schema

from ...configs.section import Section
from ...optimizers import OPTIMIZERS
from ...optimizers.optimizer import Optimizer
from .config import Config
from .read import OR_NEVER
from .translate import ALIASES, AUTO, BATCH_KEYS, NULL_IS_DEFAULT, PLANNED, deepspeed

_HOMES = {  # section: the definitions that describe it
    "data_types": ["DataTypesConfig"],
    "parallel": ["ParallelConfig"],
    "pipeline": ["PipelineConfig"],
    "tensor_parallel": ["TensorParallelConfig"],
    "sequence_parallel": ["SequenceParallelConfig"],
    "zero_optimization": ["ZeroConfig"],
    "zero_optimization.offload_optimizer": ["OffloadOptimizerConfig"],
    "zero_optimization.offload_param": ["OffloadParamConfig"],
    "bf16": ["BF16Config"],
    "fp16": ["FP16Config"],
    "torch_autocast": ["TorchAutocastConfig"],
    "activation_checkpointing": ["ActivationCheckpointingConfig"],
    "activation_checkpointing.offload": ["ActivationOffloadConfig"],
    "tiles": ["TilesConfig"],
    "compile": ["CompileConfig"],
    "aio": ["AioConfig"],
    "kernels": ["KernelsConfig"],
    "communication": ["CommunicationConfig"],
    "checkpoint": ["CheckpointConfig"],
    "memory_report": ["MemoryReportConfig"],
    "tensorboard": ["TensorboardConfig"],
    "wandb": ["WandbConfig"],
    "csv_monitor": ["CsvMonitorConfig"],
    "profile": ["ProfileConfig"],
    "flops_profiler": ["FlopsProfiler"],
    "comms_logger": ["CommsLogger"],
}
_COMMENTS: dict[str, dict[str, str]] = {r"^(_|//|\$schema$)": {}}


def schema_text() -> str:
    """The schema as it stands in configs/schema.json."""
    return json.dumps(json_schema(), indent=2) + "\n"


def json_schema() -> dict[str, Any]:
    """The schema of what `Config.load` accepts, as far as JSON schema can say it (no batch equation, no conflicts)."""
    schema: dict[str, Any] = _standard_limits(_with_optimizers(Config.model_json_schema()))
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "lowtide config"
    definitions = schema["$defs"]
    for key in ("optimizer", "scheduler"):
        _open_type_names(schema, key)
    deepspeed().add_to_schema(schema)
    for definition in [schema, *definitions.values()]:
        definition["patternProperties"] = _COMMENTS
    for path in [*NULL_IS_DEFAULT, *OR_NEVER]:
        allow(schema, path, {"type": "null"})
    for path in [*AUTO, *BATCH_KEYS, *PLANNED]:
        allow(schema, path, {"const": "auto"})
    for size in ({"const": "auto"}, {"type": "integer", "minimum": 0}):
        allow(schema, "tiles", size)
    for alias, path in ALIASES.items():
        for home in _properties(schema, alias):
            home[alias.rpartition(".")[2]] = home[path.rpartition(".")[2]]
    return schema


def _with_optimizers(schema: dict[str, Any]) -> dict[str, Any]:
    """The same schema with a section for each optimizer that there is in the place of one for all."""
    definitions, choice = schema["$defs"], schema["properties"]["optimizer"]
    del definitions["OptimizerConfig"], definitions["OptimizerParams"]
    models = [_section_of(one) for one in OPTIMIZERS.values()]
    _, made = models_json_schema([(model, "validation") for model in models])
    choice["anyOf"][0] = {"oneOf": [{"$ref": f"#/$defs/{model.__name__}"} for model in models]}
    choice["title"] = "Optimizer"
    return schema | {"$defs": dict(sorted((definitions | made["$defs"]).items()))}


def _section_of(one: Optimizer) -> type[Section]:
    fields: dict[str, Any] = {"type": (Literal[one.name], one.name), "params": (one.params, one.params())}
    return create_model(f"{one.title}Optimizer", __base__=Section, __doc__=f"{one.title}.", **fields)


def _standard_limits(schema: Any) -> Any:
    """The same schema with the standard's names for limits, which pydantic leaves out where null is allowed too."""
    names = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
    if isinstance(schema, dict):
        return {names.get(key, key): _standard_limits(value) for key, value in schema.items()}
    return [_standard_limits(item) for item in schema] if isinstance(schema, list) else schema


def _properties(schema: dict[str, Any], path: str) -> list[dict[str, Any]]:
    """The `properties` in which the last key of a path stands: one, or several where the type decides."""
    section = path.rpartition(".")[0]
    definitions = schema["$defs"]
    if section == "":
        return [schema["properties"]]
    names = _HOMES.get(section)
    if names is None:
        kind, _, params = section.partition(".")
        refs = [item["$ref"].rpartition("/")[2] for item in schema["properties"][kind]["anyOf"] if "$ref" in item]
        names = [_params_of(definitions[ref]) for ref in refs] if params else refs
    return [definitions[name]["properties"] for name in dict.fromkeys(names)]


def _params_of(definition: dict[str, Any]) -> str:
    return str(definition["properties"]["params"]["$ref"].rpartition("/")[2])


def add(schema: dict[str, Any], path: str, value: dict[str, Any]) -> None:
    for home in _properties(schema, path):
        home[path.rpartition(".")[2]] = value


def allow(schema: dict[str, Any], path: str, other: dict[str, Any]) -> None:
    """The key at `path` takes what `other` describes as well."""
    key = path.rpartition(".")[2]
    for home in _properties(schema, path):
        if key in home and other not in home[key].get("anyOf", []):
            outside = {name: home[key].pop(name) for name in ("description", "title", "default") if name in home[key]}
            home[key] = {"anyOf": [home[key], other], **outside}


def _open_type_names(schema: dict[str, Any], key: str) -> None:
    """Types are found without regard to case and by other spellings: any string that is not known to be wrong."""
    choice = schema["properties"][key]["anyOf"][0]
    choices = choice.pop("oneOf", None) or choice["anyOf"]
    schema["properties"][key]["anyOf"] = [*choices, {"type": "null"}]
    for item in choices:
        section = schema["$defs"][item["$ref"].rpartition("/")[2]]
        properties = section["properties"]
        name = properties["type"]["const"]
        others = {"adamw": ("adam", "adamw")}.get(name, (name,))  # Adam is AdamW unless adam_w_mode is false
        spellings = [word for other in others if other in OPTIMIZERS for word in OPTIMIZERS[other].deepspeed_names]
        names = [name, *spellings, *others]
        pattern = "|".join("".join(f"[{c.lower()}{c.upper()}]" for c in other) for other in dict.fromkeys(names))
        properties["type"] = {"type": "string", "pattern": f"^({pattern})$", "default": name}
        if name in ("adam", "adamw"):
            params = schema["$defs"][_params_of(section)]["properties"]
            params["adam_w_mode"] = {
                "type": "boolean",
                "default": True,
                "description": 'false: type "Adam" is Adam with its L2 penalty in the gradient.',
            }
        if name == "adam":
            of_adam = 'Adam with its L2 penalty inside the gradient. In a file: type "Adam" with `adam_w_mode` false.'
            section["description"] = of_adam
