"""What comes after a delayed update has what it wrote, on the device too; what it reads, it has from before."""

import torch

from lowtide.zero.versions import UpdateThread
from tests.kit.ranks import on_device


@on_device()
def test_an_update_is_between_what_was_given_before_and_after_it() -> None:
    """Of a parameter on the device, from a gradient that the training's stream writes late."""
    device = torch.device("pretend", 0)
    parameter, gradient = torch.zeros(3, device=device), torch.zeros(3, device=device)
    torch.accelerator.synchronize()

    def update() -> None:
        parameter.copy_(gradient, non_blocking=True)

    delayed = UpdateThread(device)
    gradient.copy_(torch.full((3,), 7.0).pin_memory(), non_blocking=True)
    delayed.start(update, [gradient])
    assert delayed.wait() is None
    after = parameter * 2  # the training goes on with it
    delayed.end()
    delayed.close()
    assert after.tolist() == [14.0] * 3
