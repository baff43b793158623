"""The section `compile`: which parts of a model torch compiles."""

from typing import Annotated

from pydantic import Field

from ...configs.section import Bool, Section
from .idle import idle


class CompileConfig(Section):
    """torch.compile on the blocks of the model, each inside of what gathers and reduces it."""

    blocks: Bool = False
    """Compile the forward of every repeated block, that of an embedding or a head not. It is compiled when it first
    runs, which takes seconds to minutes, and once for all blocks that are alike."""

    backend: Annotated[str, Field(min_length=1)] = "inductor"
    """By which backend of torch.compile: "inductor" (on the CPU it needs a C++ compiler), "aot_eager", "eager", ..."""

    mode: str | None = None
    """What torch.compile takes as mode: "default", "reduce-overhead", "max-autotune", ... null: its default."""

    dynamic: Bool | None = None
    """Whether shapes are expected to change. null: a shape that has changed is, from then on."""

    fullgraph: Bool = False
    """A block that cannot be compiled as one graph is an error."""


def compile_notes(section: CompileConfig) -> list[str]:
    """How blocks would be compiled that are not."""
    return [] if section.blocks else idle("compile", section, "compile.blocks is false")
