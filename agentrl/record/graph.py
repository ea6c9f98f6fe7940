"""The message graph: what the engine saw and sampled, as a tree of token segments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from agentrl.record.trajectory import IDS, LOGPROBS, Branch, Turn


@dataclass(eq=False, slots=True)
class Node:
    """A run of tokens: either context (no log-probs) or one sampled turn.

    Attributes:
        token_ids: int32 `[T]`, the tokens this node adds to its parent's.
        logprobs: float32 `[T]`, of the distribution sampled from; None for context.
        versions: int32 `[T]`, policy version of each sampled token; None for context.
        temperature: the turn's sampling temperature.
        finish_reason: `stop` or `length` of a sampled turn.
        reward: turn-level credit, if the agent gave any.
    """

    parent: Node | None
    token_ids: np.ndarray
    logprobs: np.ndarray | None = None
    versions: np.ndarray | None = None
    temperature: float = 1.0
    finish_reason: str = ""
    reward: float | None = None
    children: list[Node] = field(default_factory=list)

    @property
    def sampled(self) -> bool:
        return self.logprobs is not None

    def path(self) -> list[Node]:
        """The nodes from the root's first child down to this one."""
        nodes: list[Node] = []
        node: Node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def prefix_ids(self) -> list[int]:
        """All token ids from the start of the conversation to the end of this node."""
        return [token for node in self.path() for token in node.token_ids.tolist()]


class MessageGraph:
    """Records each model call as it happened; branches come out as training sequences.

    A call's prompt is matched token by token against what is already there. Where it extends a recorded path,
    the new tokens are added to it; where it differs (reasoning stripped, history edited, a parallel sub-agent),
    the graph forks and each branch keeps what its model calls really saw. Nothing is ever re-encoded.
    """

    def __init__(self) -> None:
        self.root = Node(parent=None, token_ids=np.empty(0, IDS))
        self.turns: list[Node] = []

    def add_turn(
        self,
        prompt_ids: Sequence[int],
        token_ids: np.ndarray,
        logprobs: np.ndarray,
        versions: np.ndarray,
        *,
        temperature: float,
        finish_reason: str,
    ) -> Node:
        """Records one model call.

        Args:
            prompt_ids: every token the engine saw before the first sampled one.
            token_ids: int `[T]`, sampled tokens, T >= 1.
            logprobs: float `[T]`, of the sampling distribution.
            versions: int `[T]`, the policy version each token was sampled under.

        Raises:
            ValueError: nothing sampled, or arrays of unequal length.
        """
        if not len(token_ids) == len(logprobs) == len(versions) or not len(token_ids):
            raise ValueError(
                f"a turn needs as many log-probs and versions as sampled tokens, at least one: got "
                f"{len(token_ids)} ids, {len(logprobs)} log-probs, {len(versions)} versions"
            )
        prompt = np.asarray(prompt_ids, IDS)
        parent, matched = self._longest_match(prompt)
        if matched < len(prompt):
            parent = _append(parent, Node(parent, prompt[matched:]))
        turn = Node(
            parent,
            np.asarray(token_ids, IDS),
            np.asarray(logprobs, LOGPROBS),
            np.asarray(versions, IDS),
            temperature,
            finish_reason,
        )
        self.turns.append(_append(parent, turn))
        return turn

    def _longest_match(self, ids: np.ndarray) -> tuple[Node, int]:
        """The deepest node whose whole path is a prefix of `ids`, and that path's length."""
        node, position = self.root, 0
        while True:
            for child in node.children:
                end = position + len(child.token_ids)
                if np.array_equal(child.token_ids, ids[position:end]):
                    node, position = child, end
                    break
            else:
                return node, position

    def branches(self) -> list[Branch]:
        """One training sequence per leaf, in the order in which the branches came into being.

        A sampled node shared by several branches is trained in the branch created first; in the others its
        tokens are context.
        """
        return [_branch(leaf) for leaf in _leaves(self.root)]


def _append(parent: Node, child: Node) -> Node:
    parent.children.append(child)
    return child


def _leaves(node: Node) -> Iterator[Node]:
    # First children first: the walk reaches a shared node's oldest branch before any younger one.
    if not node.children and node.parent is not None:
        yield node
    for child in node.children:
        yield from _leaves(child)


def _branch(leaf: Node) -> Branch:
    path = leaf.path()
    owned = _owned(path)
    turns: list[Turn] = []
    position = 0
    for node in path:
        end = position + len(node.token_ids)
        if node in owned and node.sampled:
            turns.append(Turn(position, end, node.temperature, node.finish_reason, node.reward))
        position = end
    branch = Branch.context(np.concatenate([node.token_ids for node in path]), turns)
    position = 0
    for node in path:
        end = position + len(node.token_ids)
        if node in owned and node.logprobs is not None and node.versions is not None:
            branch.loss_mask[position:end] = 1
            branch.logprobs[position:end] = node.logprobs
            branch.versions[position:end] = node.versions
        position = end
    return branch


def _owned(path: list[Node]) -> set[Node]:
    """The nodes of a branch that no older branch holds: from the leaf up to the last fork."""
    owned: set[Node] = set()
    for node in reversed(path):
        owned.add(node)
        if node.parent is not None and node.parent.children[0] is not node:
            break
    return owned
