"""ZeRO stages 0 to 3 as one mechanism: units of flat groups, sharded over one mesh axis, replicated over the other.

`policy` says what a stage does, `layout` where every parameter lies, `group` moves the bytes, `sequence` keeps the
order of collectives, `hooks` ties it to a module's forward and backward, and `optimizer` updates the shards.
"""
