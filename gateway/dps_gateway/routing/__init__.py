"""The routing policies: pure functions from a turn to a pool and a reason.

`decision` has the input and the result of a policy and what it can observe, and `policies` the static policies and the
names of all policies. `adaptive` is the policy that learns; it uses `estimates` (the speed of a pool) and `learned`
(what has been observed).
"""
