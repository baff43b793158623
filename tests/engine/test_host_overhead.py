"""What lowtide itself does on the host: as much with 8 as with 1024 simulated ranks, and no more than it did."""

import json
import subprocess
import sys
import textwrap

# A block has 2^20 parameters, so that 8 and 1024 ranks divide it without padding, and the data is the same for both.
# The fake backend's own collectives copy once for each rank, which is its time and not ours: here they do nothing.
SCRIPT = """
    import gc, json, sys
    from unittest import mock

    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import lowtide

    WIDTH, NUM_BLOCKS = 1024, 30


    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))

        def forward(self, x):
            return x @ self.weight


    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x.square().mean()


    class Done:
        def wait(self, *timeout):
            return True


    def nothing(*args, **kwargs):
        return Done()


    def costs(world_size):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
        model, x = Net(), torch.ones(1, WIDTH)
        config = {"optimizer": {"type": "sgd"}, "zero_optimization": {"stage": 3}, "steps_per_print": 0}
        config["gradient_clipping"] = 1.0
        counts = {}

        def counted(name, work):
            def count(frame, event, argument):
                counts[name + ", calls"] += event == "call"
                counts[name + ", lines"] += event == "line"  # each turn of a loop too
                return count

            counts[name + ", calls"] = counts[name + ", lines"] = 0
            gc.collect()  # an engine has cycles: what ends with the one before is not counted, at whatever time it ends
            gc.disable()
            sys.settrace(count)
            result = work()
            sys.settrace(None)
            gc.enable()
            return result

        engine = counted("initialize", lambda: lowtide.initialize(model, config))
        engine.train_step((x,))
        counted("step", lambda: engine.train_step((x,)))
        assert engine.world_size == world_size
        engine.close()
        dist.destroy_process_group()
        return counts


    torch.set_num_threads(1)
    names = ("lowtide.comm.native._all_gather", "lowtide.comm.native._reduce_scatter")
    with mock.patch(names[0], nothing), mock.patch(names[1], nothing):
        costs(8)
        print(json.dumps([costs(world_size) for world_size in (8, 1024)]))
"""

MAX_CALLS_IN_A_STEP = 7_080  # of Python: 30 blocks with a parameter each, on the CPU; Python 3.11 makes most


def test_8_and_1024_ranks_cost_the_same() -> None:
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT)], capture_output=True, text=True, timeout=120, check=False
    )
    assert process.returncode == 0, process.stderr
    small, large = json.loads(process.stdout)
    assert small.keys() == large.keys()
    for what, count in small.items():
        assert 0 < large[what] < 1.2 * count, (what, small, large)
    assert small["step, calls"] == large["step, calls"] <= MAX_CALLS_IN_A_STEP
