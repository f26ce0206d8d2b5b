"""The experiment: does branching pay? The same stochastic agent, from scratch and with a tree search, on several backends."""

from statefork.experiment.agent import StochasticAgent
from statefork.experiment.arenas import Arena, find_arenas
from statefork.experiment.judging import TaskScorer
from statefork.experiment.tasks import Task, load_task, load_tasks

__all__ = ["Arena", "StochasticAgent", "Task", "TaskScorer", "find_arenas", "load_task", "load_tasks"]
