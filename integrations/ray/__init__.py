"""lowtide in the workers of Ray Train: `lowtide.initialize` as it is, and checkpoints of all workers together.

def train(config):
    engine = lowtide.initialize(model, config["engine"])  # joins the process group of TorchTrainer
    restore(engine)
    while engine.global_step < config["steps"]:
        result = engine.train_step(batch)
        report(engine, {"loss": result.loss.item()})
"""

from .checkpoints import report, restore

__all__ = ["report", "restore"]
