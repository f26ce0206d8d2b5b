"""What a model is told about the whole before it sees a tool."""

from __future__ import annotations

__all__ = ["INSTRUCTIONS"]

INSTRUCTIONS = """\
StateFork gives you Linux machines ("environments") that you can save, rewind and branch, processes and memory included.

One shell per environment: exec always talks to the same shell, so cd, export, virtualenvs and functions stay from one
call to the next, and commands of one environment take turns.

Snapshot often: it takes a fraction of a second and stops nothing. Take one
- before anything that is hard to undo: a migration, an upgrade, rm, a large edit, a command you are not sure of;
- after anything slow that worked: dependencies installed, data loaded, a server up and warm.
Give it a name that says what works in that state.

Restore when something went wrong, instead of repairing it: files, running processes, their memory and the shell are then
as they were at the snapshot, and what came after it is gone in that environment. Snapshots are never lost by it. It cannot
undo what left the environment: requests to the network, pushed commits, sent mail.

Branch to compare ideas: fork gives independent copies of the present moment (or of a snapshot). Do something else in each,
compare with diff and by running the tests, go on in the best one and destroy the others. Copies share nothing: a change in
one is not seen in another.

What runs for long (servers, watchers, builds of minutes) belongs to run_in_background; wait_for_text tells when it is up.

Answers are cut to keep your context small. Where an answer has a cursor there is more: read_output, or the same tool, takes it.
Ids may be shortened as long as they fit only one. Destroy environments that you need no longer; they outlive this
conversation otherwise, and list_environments finds them again.
"""
