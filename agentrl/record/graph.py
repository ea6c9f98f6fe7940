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
        trained: whether a sampled turn is to be trained. Not one whose tokens were sampled under a grammar, since the
            recorded log-probs are not the policy's own, nor one that never reached the agent.
    """

    parent: Node | None
    token_ids: np.ndarray
    logprobs: np.ndarray | None = None
    versions: np.ndarray | None = None
    temperature: float = 1.0
    finish_reason: str = ""
    reward: float | None = None
    trained: bool = True
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
        self._forks: list[Node] = []

    def add_turn(
        self,
        prompt_ids: Sequence[int],
        token_ids: np.ndarray,
        logprobs: np.ndarray,
        versions: np.ndarray,
        *,
        temperature: float,
        finish_reason: str,
        trained: bool = True,
    ) -> Node:
        """Records one model call.

        Args:
            prompt_ids: every token the engine saw before the first sampled one.
            token_ids: int `[T]`, sampled tokens, T >= 1.
            logprobs: float `[T]`, of the sampling distribution.
            versions: int `[T]`, the policy version each token was sampled under.
            trained: see `Node`.

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
            parent = self._append(Node(parent, prompt[matched:]))
        turn = Node(
            parent,
            np.asarray(token_ids, IDS),
            np.asarray(logprobs, LOGPROBS),
            np.asarray(versions, IDS),
            temperature,
            finish_reason,
            trained=trained,
        )
        self.turns.append(self._append(turn))
        return turn

    def _longest_match(self, ids: np.ndarray) -> tuple[Node, int]:
        """The deepest node whose whole path is a prefix of `ids`, and that path's length."""
        deepest, matched = self.root, 0
        open_nodes = [(self.root, 0)]
        while open_nodes:
            node, position = open_nodes.pop()
            if position > matched:
                deepest, matched = node, position
            for child in reversed(node.children):
                end = position + len(child.token_ids)
                if np.array_equal(child.token_ids, ids[position:end]):
                    open_nodes.append((child, end))
        return deepest, matched

    def branches(self) -> list[Branch]:
        """One training sequence per leaf, in the order in which the branches came into being.

        A sampled node shared by several branches is trained in the branch created first; in the others its
        tokens are context.
        """
        return [_branch(fork) for fork in self._forks]

    def _append(self, node: Node) -> Node:
        assert node.parent is not None
        if node.parent.children or node.parent is self.root:
            self._forks.append(node)
        node.parent.children.append(node)
        return node


def _branch(fork: Node) -> Branch:
    """The branch that came into being with `fork`: what led there, and from there on always the first child."""
    context = fork.path()[:-1]
    own = list(_first_children(fork))
    branch = Branch.context(np.concatenate([node.token_ids for node in (*context, *own)]), [])
    end = sum(len(node.token_ids) for node in context)
    for node in own:
        start, end = end, end + len(node.token_ids)
        if node.logprobs is not None and node.versions is not None:
            branch.turns.append(Turn(start, end, node.temperature, node.finish_reason, node.reward))
            if not node.trained:
                continue
            branch.loss_mask[start:end] = 1
            branch.logprobs[start:end] = node.logprobs
            branch.versions[start:end] = node.versions
    return branch


def _first_children(node: Node) -> Iterator[Node]:
    yield node
    while node.children:
        node = node.children[0]
        yield node
