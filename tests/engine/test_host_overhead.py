"""What lowtide itself does on the host: as much with 8 as with 1024 simulated ranks, and no more than it did."""

import json
import subprocess
import sys
import textwrap

# A block has 2^20 parameters, so that 8 and 1024 ranks divide it without padding, and the data is the same for both.
# The fake backend's own collectives copy once for each rank, which is its time and not ours: here they do nothing.
SCRIPT = """
    import gc, json, sys, time
    from unittest import mock

    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import lowtide

    WIDTH, NUM_BLOCKS, ROUNDS = 1024, 30, 5


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
        started = time.process_time()
        engine = lowtide.initialize(model, config)
        found = {"initialize": time.process_time() - started}
        engine.train_step((x,))
        times = []
        for _ in range(3):
            started = time.process_time()
            engine.train_step((x,))
            times.append(time.process_time() - started)
        found["step"] = min(times)
        calls = 0

        def count(frame, event, argument):
            nonlocal calls
            calls += event == "call"

        sys.setprofile(count)
        engine.train_step((x,))
        sys.setprofile(None)
        found["calls in a step"] = calls
        assert engine.world_size == world_size
        engine.close()
        dist.destroy_process_group()
        return found


    torch.set_num_threads(1)
    names = ("lowtide.comm.native._all_gather", "lowtide.comm.native._reduce_scatter")
    with mock.patch(names[0], nothing), mock.patch(names[1], nothing):
        costs(8)
        found = {"8": [], "1024": []}
        for _ in range(ROUNDS):
            for world_size in (8, 1024):
                found[str(world_size)].append(costs(world_size))
                gc.collect()
    print(json.dumps(found))
"""

MAX_CALLS_IN_A_STEP = 7_080  # of Python: 30 blocks with a parameter each, on the CPU; Python 3.11 makes most


def test_8_and_1024_ranks_cost_the_same() -> None:
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT)], capture_output=True, text=True, timeout=120, check=False
    )
    assert process.returncode == 0, process.stderr
    found = json.loads(process.stdout)
    for what in ("initialize", "step", "calls in a step"):
        # The least of several rounds, taken in turn: what else runs can only add to one.
        small, large = (min(costs[what] for costs in found[world_size]) for world_size in ("8", "1024"))
        assert 0 < large < 1.2 * small, (what, found)
        assert what != "calls in a step" or small == large <= MAX_CALLS_IN_A_STEP
