"""Who may do what, how much of it, and what is written down about it: tokens, limits, errors, audit, metrics, logs.

`install.install(app, guard)` puts all of it around a FastAPI application. This room knows nothing of environments: routes tell
it what they did (`Guard.note`, `Metrics.operation`) and ask it who is calling (`principal.require`).
"""
