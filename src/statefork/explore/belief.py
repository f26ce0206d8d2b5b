"""How much a search may still expect of each state: the chance that an attempt from there succeeds, for what it costs.

A score says how far a state is, not whether it can still be brought to the end: what was used up or damaged on the way often
does not show in it. So two things are kept apart.

*Sound*: whether the goal can be reached from a state at all. Before anything was tried from it that is a matter of how the score
moved by the step that led there (SOUND). Every attempt that ended below it without success speaks against it, and the more so
the less stood between it and the end; so do steps by which the score does not rise (SEEN). By Bayes' rule, over the tree:

    l(n) = product over the children c of n:  seen(c) (sound(c) l(c) + 1 - sound(c))     what became of n, if n is sound
    l(n) = 0 where an attempt ended
    b(c) = sound(c) l(c) / (sound(c) l(c) + 1 - sound(c))                                c is sound, if its parent is

A tempting state that leads nowhere loses its promise by this, first near its ends and then step by step towards the root, which is
sound by definition.

*Far*: how many steps are left, by the score and by the depth, in lengths of the attempts that have ended. Each of them succeeds
with the chance STEP.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from statefork.explore.model import Node

__all__ = ["Belief"]

SOUND = {1: 0.9, 0: 0.7, -1: 0.1}
"""That a step left its state sound, by whether the score rose, stayed or fell."""
SEEN = {1: 1.4, 0: 0.9, -1: 0.9}
"""How much oftener the score moves so from a sound state than from one that is not."""
STEP = 0.7
"""That one more step is right."""
BY_SCORE = 0.5
"""How much of the distance to the goal is told by the score; the rest is told by the depth, as scores may not move for long."""
DOUBT = 1e-6
"""No belief is firmer than this: where all else is used up, the least likely is still tried."""


class Belief:
    """Made anew from the tree for each decision: the same tree gives the same, also after a crash."""

    def __init__(self, nodes: Sequence[Node], is_open: Callable[[Node], bool], depth: int) -> None:
        """`nodes`: all of them, each after its parent. `is_open`: something more may be tried at this very node, now."""
        self._promise: dict[int, float] = {}
        self._own: dict[int, float] = {}
        ends = [node for node in nodes if _is_end(node, depth)]
        lengths = [node.depth for node in ends if not node.ended] or [max(node.depth for node in nodes) + 2]
        self._length = sum(lengths) / len(lengths)
        dead = {node.id for node in ends}
        likely: dict[int, float] = {}
        for node in reversed(nodes):
            below = 1.0
            best = self._own[node.id] = self._alone(node) if is_open(node) else 0.0
            for child in node.children:
                if child.id not in likely:
                    continue  # another worker is just adding it
                sound = _sound(child)
                though_sound = sound * likely[child.id]
                below *= (though_sound + 1 - sound) * SEEN[_moved(child)]
                self._promise[child.id] *= max(though_sound / (though_sound + 1 - sound), DOUBT)
                best = max(best, self._promise[child.id])
            likely[node.id] = 0.0 if node.id in dead else below
            self._promise[node.id] = best

    def below(self, child: Node) -> float:
        """The best that can be had at a node or below it, as its parent sees it."""
        return self._promise.get(child.id, 0.0)

    def here(self, node: Node) -> float:
        """What another try at the node itself is worth; every one before it halves, thirds, ... what is expected of it."""
        return self._own.get(node.id, 0.0)

    def _alone(self, node: Node) -> float:
        by_score = (1 - min(max(node.score, 0.0), 1.0)) * self._length
        left = BY_SCORE * by_score + (1 - BY_SCORE) * max(self._length - node.depth, 0.5)
        return float(STEP**left / (left + 1) / (len(node.children) + 1))


def _is_end(node: Node, depth: int) -> bool:
    """An attempt ended here without success: the policy thought that it was done, or it was too long, or nothing can follow."""
    return not node.children and node.score < 1 and (node.spent or node.ended or node.depth >= depth)


def _moved(node: Node) -> int:
    assert node.parent is not None
    return (node.score > node.parent.score) - (node.score < node.parent.score)


def _sound(node: Node) -> float:
    return SOUND[_moved(node)]
