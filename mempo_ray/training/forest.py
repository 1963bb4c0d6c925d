"""Rows that begin alike run once: rows → a forest of token nodes → passes of a token budget. Numpy only.

    Row … ─ sort ─▶ neighbours share the most ─ cut at the budget ─▶ groups ─ trie ─▶ Pass, one forward each

Two rows share exactly the ids that both begin with, whichever request they came from: the full history of a
trajectory is one trunk with a probe behind each turn, siblings share their question, and equal contexts are one node,
so that their log-probs are the same number, not nearly the same. What stands behind a row's last predictor is not run.

The tokens of a pass stand in depth-first order, the longest branch first. Hence

    token i sees token j   ⇔   j ≤ i < ends_T[j]              (ends_T[j]: where j's subtree ends)

and every *chain* (a node, its longest branch, that one's longest branch, …) is one contiguous range, which attends to
ranges of earlier chains and, causally, to itself.

    Example: rows [5 6 7 8*], [5 6 9*], [5 6 7 3*]; * marks the targets.

        5 ─ 6 ─ 7      7 predicts 8 and 3, 6 predicts 9; no target has to be run itself:
                       rows = (1, 0, 2), ids_T = [5, 6, 7], predictors_U = [1, 2],
                       targets_K = [9, 8, 3], slots_K = [0, 1, 1]

Axes: `_T` tokens of a pass, `_U` its distinct predictors, `_K` its targets, row by row.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mempo_ray.training.rows import Row

PASS_TOKENS = 128
"""What a pass costs beyond its tokens, in tokens: one more is made only where it saves repeating more than that."""
PIECE_TOKENS = 256
"""Longest piece of a branch that attends through a mask: the mask [piece, all keys before] is built in each layer."""

Range = tuple[int, int]


@dataclass(frozen=True)
class Block:
    """Tokens [start, stop) of a pass attend to all of `prefix` and, causally, to themselves.

    `is_square`: do it as one causal square over prefix and block, and drop the prefix's rows of the result. Cheaper
    than a mask, which cannot skip what it hides, where the block is longer than its prefix.
    """

    start: int
    stop: int
    prefix: tuple[Range, ...]
    is_square: bool

    @property
    def num_prefix(self) -> int:
        return sum(stop - start for start, stop in self.prefix)


@dataclass(frozen=True, eq=False)
class Pass:
    """One forward. Target k of the rows is read at logits `slots_K[k]`, which stand at token `predictors_U[…]`."""

    rows: tuple[int, ...]  # indices in the caller's list; () = a dummy
    num_targets: tuple[int, ...]  # of each of them; they sum to K
    ids_T: np.ndarray  # int64
    depths_T: np.ndarray  # int64: position ids
    ends_T: np.ndarray  # int64: where the subtree of each token ends
    blocks: tuple[Block, ...]  # in order; together they cover all tokens
    predictors_U: np.ndarray  # int64, ascending
    temperature_U: np.ndarray  # float32
    slots_K: np.ndarray  # int64
    targets_K: np.ndarray  # int64: ids
    num_trunks: int  # chains that others hang on

    @property
    def num_tokens(self) -> int:
        return len(self.ids_T)


@dataclass(frozen=True, eq=False)
class ForestPlan:
    """Passes that hold every row once, and what sharing has saved. `num_plain_tokens`: a row at a time."""

    num_rows: int
    passes: tuple[Pass, ...]
    num_plain_tokens: int

    @property
    def num_tokens(self) -> int:
        return sum(p.num_tokens for p in self.passes)

    @property
    def num_trunks(self) -> int:
        """Chains with branches: a history, memories that begin alike; one more for each history that does not go on
        where the one before it ended."""
        return sum(p.num_trunks for p in self.passes)


def plan_forest(rows: Sequence[Row], budget: int, *, share: bool = True) -> ForestPlan:
    """Passes of at most `budget` tokens, or of the longest row's where that is more: it must run in one piece anyway.

    A tree above the budget is cut into several, each with its own copy of the trunk, where that repeats the least.
    `share=False`: the rows one behind another, in the order given.

    Cost: O(R log R) comparisons of rows, one copy of the plain rows; Python works by row, numpy by token.
    """
    ids = [row.ids_T[: _num_needed(row)] for row in rows]
    order, shared = list(range(len(rows))), np.zeros(len(rows), np.int64)
    if share:
        keys = [values.astype(">u4").tobytes() for values in ids]  # big-endian: bytes sort as the ids do
        order.sort(key=keys.__getitem__)
        shared[1:] = [_common(ids[a], ids[b]) for a, b in itertools.pairwise(order)]
    lengths = np.array([len(ids[i]) for i in order], np.int64)
    passes = []
    for start, stop in _cut(lengths, shared, budget):
        group = order[start:stop]
        passes.append(_Trie([ids[i] for i in group], [0, *shared[start + 1 : stop].tolist()]).lay_out(rows, group))
    return ForestPlan(len(rows), tuple(passes), int(lengths.sum()))


def _num_needed(row: Row) -> int:
    """Tokens up to the last predictor: the last target itself is never an input."""
    return max(1, int(row.targets_K.max(initial=1)))


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """How many ids a and b begin with alike."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    first = int(differs.argmax()) if n else 0
    return first if n and differs[first] else n


def _cut(lengths: np.ndarray, shared: np.ndarray, budget: int) -> list[Range]:
    """Consecutive groups within the budget that repeat the fewest tokens.

    Row j behind its neighbour adds lengths[j] − shared[j] tokens; where a group begins, shared[j] are repeated. The
    least Σ (shared[cut] + PASS_TOKENS) over all cuts, by dynamic programming over the last one.

    Example: _cut([9, 9, 9, 9], [0, 8, 0, 8], 12) == [(0, 2), (2, 4)].
    """
    limit = max(budget, int(lengths.max(initial=0)))
    added = np.concatenate([[0], np.cumsum(lengths - shared)])
    best = np.zeros(len(lengths) + 1, np.int64)
    last_cut = np.zeros(len(lengths) + 1, np.int64)
    for stop in range(1, len(lengths) + 1):
        first = int(np.searchsorted(added, added[stop] - limit))
        cuts = np.arange(min(first, stop - 1), stop)
        tokens = shared[cuts] + added[stop] - added[cuts]
        costs = np.where(tokens <= limit, best[cuts] + shared[cuts] + PASS_TOKENS, np.iinfo(np.int64).max)
        chosen = int(costs.argmin())
        best[stop], last_cut[stop] = costs[chosen], cuts[chosen]
    groups, stop = [], len(lengths)
    while stop:
        groups.append((int(last_cut[stop]), stop))
        stop = groups[-1][0]
    return groups[::-1]


class _Trie:
    """Nodes of sorted rows. Node n holds the ids [bottom[parent[n]], bottom[n]) of `row[n]`; 0 is above all roots."""

    def __init__(self, ids: Sequence[np.ndarray], shared: Sequence[int]) -> None:
        self.ids = ids
        self.parent, self.bottom, self.row = [-1], [0], [-1]
        self.leaf: list[int] = []  # of each row
        path = [0]
        for row, (values, common) in enumerate(zip(ids, shared, strict=True)):
            below = -1
            while self.bottom[path[-1]] > common:
                below = path.pop()
            if self.bottom[path[-1]] < common:  # the branch parts in the middle of node `below`
                path.append(self._add(path[-1], common, self.row[below]))
                self.parent[below] = path[-1]
            if len(values) > common:
                path.append(self._add(path[-1], len(values), row))
            self.leaf.append(path[-1])

    def _add(self, parent: int, bottom: int, row: int) -> int:
        self.parent.append(parent)
        self.bottom.append(bottom)
        self.row.append(row)
        return len(self.parent) - 1

    def lay_out(self, rows: Sequence[Row], group: Sequence[int]) -> Pass:
        """Depth first, the longest branch of each node before its others, so that a chain is one range."""
        top = [0, *(self.bottom[p] for p in self.parent[1:])]
        size = [b - t for b, t in zip(self.bottom, top, strict=True)]
        reach = list(self.bottom)
        children: list[list[int]] = [[] for _ in size]
        for node in sorted(range(1, len(size)), key=lambda n: -self.bottom[n]):  # children before parents
            parent = self.parent[node]
            children[parent].append(node)
            size[parent] += size[node]
            reach[parent] = max(reach[parent], reach[node])

        ids_T, depths_T, ends_T = (np.empty(size[0], np.int64) for _ in range(3))
        chains: list[_Chain] = []
        chain_of: dict[int, _Chain] = {}
        stack, cursor = children[0][::-1], 0
        while stack:
            node = stack.pop()
            chain = chain_of.get(node)
            if chain is None:
                chain = chain_of[node] = _Chain.behind(chain_of.get(self.parent[node]), top[node], cursor)
                chains.append(chain)
            stop = cursor + self.bottom[node] - top[node]
            ids_T[cursor:stop] = self.ids[self.row[node]][top[node] : self.bottom[node]]
            depths_T[cursor:stop] = np.arange(top[node], self.bottom[node])
            ends_T[cursor:stop] = cursor + size[node]
            chain.stop = cursor = stop
            if children[node]:
                longest = max(children[node], key=reach.__getitem__)
                chain_of[longest] = chain
                stack += [child for child in children[node] if child != longest]
                stack.append(longest)

        predictors = [chain_of[leaf].positions(rows[i].targets_K - 1) for leaf, i in zip(self.leaf, group, strict=True)]
        temperatures = np.repeat([rows[i].temperature for i in group], [len(p) for p in predictors])
        known, which = np.unique(temperatures, return_inverse=True)
        distinct, slots_K = np.unique(np.concatenate(predictors) * len(known) + which, return_inverse=True)
        return Pass(
            rows=tuple(group),
            num_targets=tuple(len(p) for p in predictors),
            ids_T=ids_T,
            depths_T=depths_T,
            ends_T=ends_T,
            blocks=tuple(block for chain in chains for block in chain.blocks()),
            predictors_U=distinct // max(1, len(known)),
            temperature_U=known[distinct % max(1, len(known))].astype(np.float32),
            slots_K=slots_K,
            targets_K=np.concatenate([rows[i].ids_T[rows[i].targets_K] for i in group]),
            num_trunks=sum(chain.has_branches for chain in chains),
        )


@dataclass(eq=False)
class _Chain:
    """A range of tokens whose depths rise by one. `steps`: (depth, position − depth) of those above it, and of it."""

    start: int
    stop: int
    prefix: tuple[Range, ...]
    steps: tuple[tuple[int, int], ...]
    has_branches: bool = False

    @classmethod
    def behind(cls, parent: _Chain | None, depth: int, start: int) -> _Chain:
        """A new chain that branches off `parent` at `depth`."""
        if parent is None:
            return cls(start, start, (), ((0, start),))
        parent.has_branches = True
        prefix = (*parent.prefix, (parent.start, depth + parent.steps[-1][1]))
        return cls(start, start, prefix, (*parent.steps, (depth, start - depth)))

    def positions(self, depths: np.ndarray) -> np.ndarray:
        """Where the tokens of a row that ends in this chain stand."""
        tops, shifts = np.array(self.steps, np.int64).T
        return depths + shifts[np.searchsorted(tops, depths, "right") - 1]

    def blocks(self) -> list[Block]:
        whole = Block(self.start, self.stop, self.prefix, is_square=True)
        if whole.num_prefix < self.stop - self.start:
            return [whole]
        pieces = []
        for start in range(self.start, self.stop, PIECE_TOKENS):
            before = ((self.start, start),) if start > self.start else ()
            pieces.append(Block(start, min(start + PIECE_TOKENS, self.stop), (*self.prefix, *before), is_square=False))
        return pieces
