"""`dps simulate`: a fleet of emulated engines behind the gateway's routing policies, in virtual time.

`run` is the simulation: an event queue that drives the sessions (`trace`, `prompts`), the gateway
(`gateway`, `budget`) and the engines. `fleet` builds these: an `engine` has the emulated engine's scheduler, takes its
durations from a time model (`roofline` and the modules named `..._timing`), and runs on a `gpu`. `report`
evaluates a run, and `compare` runs several policies and fleets. `cli` is the command.
"""
