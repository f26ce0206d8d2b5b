"""Programs that run inside an environment: each holds one kind of state in a process and judges it there.

They are sent in as source and run by the environment's own `python3` (3.7 or later, standard library only).
"""
