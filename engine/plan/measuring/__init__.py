"""How fast this machine is at what a training does: see `engine/plan/measured.py` for what is written down."""
