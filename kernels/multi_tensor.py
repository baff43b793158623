"""Cast, scale and add of many tensors in few launches.

    destination_i = round(scale * source_i)                          or, to accumulate,
    destination_i = round(scale * source_i + destination_i)

Computed in float32 (float64 where a tensor is) and rounded once to the dtype of the destination; the GPU may fuse the
multiplication and the addition. A scale of 1.0 without accumulation is a copy, bit for bit where the dtypes agree.
The Triton form has one launch for each pair of dtypes, and one more where addresses are no multiples of 16 bytes; it
reads where tensors lie from a table that is sent ahead of it. Its launches are not for CUDA graphs: the table would be
sent again from memory that has been given back.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .dispatch import Backend, uses_triton


def copy_scaled(
    destinations: Sequence[Tensor],
    sources: Sequence[Tensor | None],
    scale: float | Tensor = 1.0,
    *,
    accumulate: bool = False,
    backend: Backend = "auto",
) -> None:
    """Writes scale * sources[i], (...), into destinations[i], (...). None as a source: zeros; to accumulate, nothing.

    scale: a number, or a floating-point tensor of one element on the device of the tensors, which the host does not
    read. Destinations must not overlap each other; a source may be its own destination. Raises ValueError where
    tensors do not fit together.
    """
    _check(destinations, sources, scale)
    if accumulate:  # nothing is added there
        kept = [index for index, source in enumerate(sources) if source is not None]
        destinations, sources = [destinations[index] for index in kept], [sources[index] for index in kept]
    with torch.no_grad():
        factor = scale.float() if isinstance(scale, Tensor) else None
        if uses_triton(backend, "copy_scaled", *destinations, *sources, factor):
            from .triton import multi_tensor as triton_form

            triton_form.copy_scaled(destinations, sources, scale if factor is None else factor, accumulate)
        else:
            copy_scaled_reference(destinations, sources, scale, accumulate)


def copy_into_flat(
    flat: Tensor,
    offsets: Sequence[int],
    sources: Sequence[Tensor],
    scale: float | Tensor = 1.0,
    *,
    accumulate: bool = False,
    zero_gaps: bool = False,
    backend: Backend = "auto",
) -> None:
    """`copy_scaled` of sources[i], (...), to flat[offsets[i] : offsets[i] + its numel]. flat: (n,), contiguous.

    zero_gaps: writes zeros to all of flat that belongs to no source. Raises ValueError where a source reaches out of
    flat, or into another.
    """
    places = _places(flat, offsets, sources)
    gaps = _gaps(flat, offsets, sources) if zero_gaps else []
    copy_scaled([*places, *gaps], [*sources, *[None] * len(gaps)], scale, accumulate=accumulate, backend=backend)
    if accumulate and gaps:
        copy_scaled(gaps, [None] * len(gaps), backend=backend)


def copy_from_flat(
    flat: Tensor,
    offsets: Sequence[int],
    destinations: Sequence[Tensor],
    scale: float | Tensor = 1.0,
    *,
    accumulate: bool = False,
    backend: Backend = "auto",
) -> None:
    """`copy_scaled` of flat[offsets[i] : offsets[i] + numel of destinations[i]] to destinations[i], as above."""
    copy_scaled(destinations, _places(flat, offsets, destinations), scale, accumulate=accumulate, backend=backend)


def copy_scaled_reference(
    destinations: Sequence[Tensor], sources: Sequence[Tensor | None], scale: float | Tensor, accumulate: bool
) -> None:
    """The formula in eager torch."""
    empty = [place for place, source in zip(destinations, sources, strict=True) if source is None]
    if empty:
        torch._foreach_zero_(empty)
    pairs = [(place, source) for place, source in zip(destinations, sources, strict=True) if source is not None]
    if not pairs:
        return
    places, given = [place for place, _ in pairs], [source for _, source in pairs]
    is_one = isinstance(scale, float | int) and scale == 1
    if is_one and not accumulate:
        torch._foreach_copy_(places, given)
        return
    if is_one:
        torch._foreach_add_(places, given)
        return
    for place, source in pairs:
        dtype = torch.promote_types(torch.promote_types(place.dtype, source.dtype), torch.float32)
        scaled = source.to(dtype) * (scale.to(dtype).reshape(()) if isinstance(scale, Tensor) else scale)
        place.copy_(scaled.add_(place) if accumulate else scaled)


def _check(destinations: Sequence[Tensor], sources: Sequence[Tensor | None], scale: float | Tensor) -> None:
    if len(destinations) != len(sources):
        raise ValueError(
            f"copy_scaled: expected as many sources as destinations, {len(destinations)}, found {len(sources)}"
        )
    for index, (place, source) in enumerate(zip(destinations, sources, strict=True)):
        if source is not None and source.shape != place.shape:
            raise ValueError(
                f"copy_scaled: expected source {index} of the shape of its destination, {tuple(place.shape)}, found "
                f"{tuple(source.shape)}"
            )
        if not place.is_floating_point():
            raise ValueError(f"copy_scaled: expected a floating-point destination {index}, found {place.dtype}")
        if source is not None and not source.is_floating_point():
            raise ValueError(f"copy_scaled: expected a floating-point source {index}, found {source.dtype}")
    if isinstance(scale, Tensor) and (scale.numel() != 1 or not scale.is_floating_point()):
        raise ValueError(
            f"copy_scaled: expected scale to be a number or a floating-point tensor of one element, found "
            f"{tuple(scale.shape)} {scale.dtype}"
        )


def _places(flat: Tensor, offsets: Sequence[int], tensors: Sequence[Tensor]) -> list[Tensor]:
    if flat.dim() != 1 or not flat.is_contiguous():
        raise ValueError(
            f"copy_scaled: expected a contiguous flat buffer of one dimension, found {tuple(flat.shape)} with strides "
            f"{flat.stride()}"
        )
    if len(offsets) != len(tensors):
        raise ValueError(f"copy_scaled: expected as many offsets as tensors, {len(tensors)}, found {len(offsets)}")
    end_of_last = 0
    for offset, numel in sorted(zip(offsets, map(Tensor.numel, tensors), strict=True)):
        if offset < end_of_last or offset + numel > flat.numel():
            raise ValueError(
                f"copy_scaled: expected tensors to lie in flat, [0, {flat.numel()}), without overlap; found one at "
                f"[{offset}, {offset + numel}), where [{end_of_last}, {flat.numel()}) is free"
            )
        end_of_last = offset + numel
    start = flat.storage_offset()
    return [
        flat.as_strided(tensor.shape, tensor.stride(), start + offset)
        if tensor.is_contiguous()
        else flat[offset : offset + tensor.numel()].view(tensor.shape)
        for offset, tensor in zip(offsets, tensors, strict=True)
    ]


def _gaps(flat: Tensor, offsets: Sequence[int], sources: Sequence[Tensor]) -> list[Tensor]:
    gaps, end = [], 0
    for offset, numel in sorted(zip(offsets, map(Tensor.numel, sources), strict=True)):
        if end < offset:
            gaps.append(flat[end:offset])
        end = offset + numel
    return [*gaps, flat[end:]] if end < flat.numel() else gaps
