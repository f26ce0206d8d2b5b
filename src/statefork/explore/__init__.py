"""Search over live state, on any backend: fork, act, judge, keep the best, drop the rest."""

from statefork.explore.changes import Changes, changed_files
from statefork.explore.chat import ChatPolicy, ChatSettings
from statefork.explore.field import ReplayDiffers
from statefork.explore.model import Action, Budget, Node, Policy, Scorer, Watch
from statefork.explore.oci import write_image
from statefork.explore.policies import Scripts, Weighted
from statefork.explore.promoting import keep, promote
from statefork.explore.replaying import Replayed, replay, replay_to
from statefork.explore.retrying import retry
from statefork.explore.scorers import ByCallable, ExitCode, Number, PassedTests
from statefork.explore.searches import Outcome, beam, best_of_n, mcts
from statefork.explore.trace import read_trace

__all__ = [
    "Action",
    "Budget",
    "ByCallable",
    "Changes",
    "ChatPolicy",
    "ChatSettings",
    "ExitCode",
    "Node",
    "Number",
    "Outcome",
    "PassedTests",
    "Policy",
    "ReplayDiffers",
    "Replayed",
    "Scorer",
    "Scripts",
    "Watch",
    "Weighted",
    "beam",
    "best_of_n",
    "changed_files",
    "keep",
    "mcts",
    "promote",
    "read_trace",
    "replay",
    "replay_to",
    "retry",
    "write_image",
]
