"""ZeRO stages 0 to 3 as one mechanism: units of flat groups, sharded and replicated over axes of the mesh.

`policy` says what a stage does, `domain` over which axes a group is divided, `layout` where every parameter lies,
`group` moves the bytes, `sequence` keeps the order of collectives, `hooks` ties it to a module's forward and backward,
and `optimizer` updates the shards.
"""
