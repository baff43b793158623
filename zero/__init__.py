"""ZeRO stages 0 to 3 as one mechanism: units of flat groups, sharded and replicated over mesh axes.

`policy` defines the stages, `sharding` the axes of a group, `layout` the offsets of its parameters. `group` gathers and
releases, `sequence` keeps the order of collectives, `hooks` connects it to a module, `optimizer` updates the shards.
"""
