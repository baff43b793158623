"""The batch triple: train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x ranks."""

from dataclasses import dataclass

from .errors import Fault


@dataclass(frozen=True)
class Batch:
    """The three sizes, all filled."""

    train: int
    micro: int
    accumulation: int


def nearest_multiples(value: int, unit: int) -> str:
    """The multiples of `unit` next to `value`, as text: "8 or 12"."""
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)


def nearest_divisors(value: int, of: int) -> str:
    """The divisors of `of` next to `value`, as text: "2 or 4"."""
    divisors = [d for d in range(1, of + 1) if of % d == 0]
    below = [d for d in divisors if d <= value][-1:]
    above = [d for d in divisors if d > value][:1]
    return " or ".join(str(d) for d in below + above)


def fill_batch(train: int | None, micro: int | None, accumulation: int | None, world_size: int) -> Batch | Fault:
    """The whole triple from what is given, or the fault that shows why there is none.

    One or two values give the rest: a missing accumulation or microbatch is 1 where the others leave it open.
    """
    if train is None:
        micro, accumulation = micro or 1, accumulation or 1
        return Batch(micro * accumulation * world_size, micro, accumulation)
    if micro is None:
        accumulation = accumulation or 1
        unit, unknown = accumulation * world_size, "train_micro_batch_size_per_gpu"
        micro = train // unit
    elif accumulation is None:
        unit, unknown = micro * world_size, "gradient_accumulation_steps"
        accumulation = train // unit
    else:
        unit, unknown = micro * accumulation * world_size, ""
    if micro * accumulation * world_size == train:
        return Batch(train, micro, accumulation)
    m = "?" if unknown.startswith("train") else str(micro)
    a = "?" if unknown.startswith("gradient") else str(accumulation)
    equation = (
        f"train_batch_size({train}) = train_micro_batch_size_per_gpu({m}) x gradient_accumulation_steps({a}) "
        f"x data-parallel ranks({world_size})"
    )
    if unknown:
        fix = f"set train_batch_size to a multiple of {unit}: {nearest_multiples(train, unit)}"
        return Fault("train_batch_size", "conflict", f"no whole {unknown} makes {equation} hold; {fix}")
    fixes = [f"train_batch_size {unit}"]
    if train % (accumulation * world_size) == 0:
        fixes.append(f"train_micro_batch_size_per_gpu {train // (accumulation * world_size)}")
    if train % (micro * world_size) == 0:
        fixes.append(f"gradient_accumulation_steps {train // (micro * world_size)}")
    message = f"{equation} does not hold: the product is {unit}; the nearest legal values are {', or '.join(fixes)}"
    return Fault("train_batch_size", "conflict", message)
