"""What the inner part of a step loses at least, by a linear program whose right-hand sides are the state at its edge.

Ours. `bound.py` decides tensors from both ends of the step inward; what is left is a smaller step that begins with some
bytes taken and with copies under way. Here tensors may be divided again, but the outer ones, which are the large ones,
have been decided.

[Note: why no inner decisions lose less]
Take any way to go on from the state and set each variable to what happens in it. Candidates that are not decided yet
have `swap` and `drop` (else they stay); they, and decided ones that are held, have for each op at which somebody made
from them may be replayed two shares in `there`: swapped, or dropped, and back by then. Memory is looked at once between
two uses: at the op with the highest load there. Every row below then holds, and the objective, all waits and all
replays from here on, is what is lost (what held ones still owe is the state's).

1.  Memory at an op: the load with everybody away, who stays, who is back already, and what is under way (at least
    `moving`) fit into the budget. Replays' own memory would only add to it.
2.  `moving`, bytes that are queued and not across: it grows by what is queued and falls by no more than what the link
    carries in the time that passes: plain time, waits and, in backward, replays. A copy's latency, and that its memory
    is free only at its end, are left out. Of copies under way at the edge it is known when they end: a second row says
    that they take all of their memory until then, less some slope times the wait that brings their end nearer.
3.  Replays: a child that is replayed by some op needs its parents there by then, kept or back.
4.  The waits up to an op are at least those of the copies that are under way at the edge, with nobody inside taking
    room (`look_ahead` in `states.py`); in backward replays shorten them.
5.  Replays for children so far inside that `REACH` leaves them out may give their time to the link whenever it helps.
"""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.papers.proof.parametric_program import Cut, ParametricProgram
from benchmarks.papers.proof.states import HELD, HELD_SWAP, KEPT, LEAVING, STAYING, WORD, Nest

__all__ = ["SLOPES", "InnerProgram", "Outside", "look_ops", "outside_of"]

EDGE = 3
"""Parameters before those of the looks: bytes that stay, bytes under way out and in."""

SLOPES = np.array([2.0, 5.0, 20.0])
"""How many times as fast as a link memory becomes free while compute waits, in rows about whole copies under way."""

REACH = 10
"""How many places further in a child may be for whose replay a row says when its parent has to be there."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def look_ops(nest: Nest, position: int, middle: int) -> tuple[Ints, Ints]:
    """Return the ops of forward (rising) and of backward (falling) at which the inner part's memory is looked at.

    Between two ops after which candidates leave, or before which they are used again, the one with the highest load.
    """
    begin = int(nest.forward_end[position - 1])
    ends = sorted({int(op) + 1 for op in nest.last_op if begin <= op < middle})
    forward = _highest(nest.least_bytes, [begin, *ends, middle])
    top = int(nest.next_op[position - 1])
    falls = sorted({int(op) for op in nest.next_op if middle < op < top})
    # Of equal loads the one that backward comes to last is looked at first, as copies back are seen from there.
    backward = _highest(nest.least_bytes[::-1], [len(nest.least_bytes) - op for op in [top, *falls[::-1], middle]])
    return np.array(forward, np.int64), np.array([len(nest.least_bytes) - 1 - op for op in backward], np.int64)


def _highest(load: Floats, edges: list[int]) -> list[int]:
    return [first + int(np.argmax(load[first:end])) for first, end in pairwise(edges) if first < end]


class Outside(NamedTuple):
    """Decided candidates that the inner part has to do with, and where they differ between states.

    Attributes:
        makers: Those from whom somebody inside may be made: a state has each kept, held and swapped, held and dropped,
            or none of these.
        pending: Those whose last use in forward is inside: a state has each staying, leaving or neither.
    """

    makers: tuple[int, ...]
    pending: tuple[int, ...]

    def flags(self, masks: Ints) -> Floats:
        """Return a row for each state: three ones and zeros for each maker, two for each that is pending."""
        columns: list[NDArray[np.bool_]] = []
        for each in self.makers:
            held, swapped = _bits(masks, HELD, each), _bits(masks, HELD_SWAP, each)
            columns += [_bits(masks, KEPT, each), held & swapped, held & ~swapped]
        for each in self.pending:
            columns += [_bits(masks, STAYING, each), _bits(masks, LEAVING, each)]
        return np.array(columns, np.float64).reshape(len(columns), len(masks)).T


def outside_of(nest: Nest, masks: Ints, position: int) -> Outside:
    """Return who of the decided ones matters to the inner part of any of these states."""
    held = [each for each in range(position) if _bits(masks, HELD, each).any()]
    inner = range(position, len(nest.last_op))
    kept = {p for child in inner for p in _slice(nest.parents, nest.parent, child) if p < position}
    kept |= {p for child in held for p in _slice(nest.parents, nest.parent, child) if p < position}
    pending = [each for each in range(position) if nest.last_op[each] >= nest.forward_end[position - 1]]
    return Outside(tuple(sorted({*held, *kept})), tuple(pending))


def _bits(masks: Ints, at: int, position: int) -> NDArray[np.bool_]:
    word, bit = divmod(position, WORD)
    return ((masks[:, at + word] >> bit) & 1) > 0


class InnerProgram:
    """The linear program of one inner part. Mutable: candidates may be held to a decision, and let go again.

    Args:
        nest: The step.
        position: The first candidate that is not decided.
        middle: The op at which backward begins.
        rates: Bytes per second of the links, out and in.
        outside: Who of the decided ones matters.
        ceiling_s: More loss than this is not told from infinitely much.
    """

    def __init__(
        self, nest: Nest, position: int, middle: int, rates: tuple[float, float], outside: Outside, ceiling_s: float
    ) -> None:
        self.nest, self.position, self.middle = nest, position, middle
        self.size = nest.size_bytes
        self.inner = range(position, len(nest.last_op))
        self.starts_s = np.concatenate([[0.0], np.cumsum(nest.time_s)])
        self.forward, self.backward = look_ops(nest, position, middle)
        self.unit_bytes, self.unit_s = float(nest.budget_bytes[0]) / 1000, float(nest.time_s.sum()) / 1000
        self.longest = (2 * ceiling_s + float(nest.help_s.sum())) / self.unit_s + 1
        self.rates = tuple(rate * self.unit_s / self.unit_bytes for rate in rates)  # in the units of the program
        self.num_looks = len(self.forward) + len(self.backward)
        self.num_bytes = EDGE + len(SLOPES) * self.num_looks
        flags = self.num_numbers = self.num_bytes + self.num_looks
        self.flag_of = {each: flags + 3 * place for place, each in enumerate(outside.makers)}
        flags += 3 * len(outside.makers)
        self.pending = {each: flags + 2 * place for place, each in enumerate(outside.pending)}
        self.program = program = ParametricProgram(flags + 2 * len(outside.pending))
        self.most = 4 * float(self.size.sum()) / self.unit_bytes + 1000
        self.beyond = program.variable(self.most, cost=1e3 * max(1 / rate for rate in self.rates))
        self.parents = [_slice(nest.parents, nest.parent, each) for each in range(len(nest.last_op))]
        self.swap: dict[int, int] = {}
        self.drop: dict[int, int] = {}
        self.times: dict[int, list[int]] = {}
        self.there: dict[tuple[int, int], tuple[int, int]] = {}  # candidate and op: swapped, or dropped, and back
        self._add_candidates()
        self._add_makers()
        self._add_parents()
        self._add_forward()
        self._add_backward()

    def cut(self, parameters: Floats) -> Cut:
        """Return a function below what is lost, in seconds, by the state.

        Args:
            parameters: Bytes that stay; what `look_ahead` returns; the flags of `Outside`.
        """
        unit = np.ones(len(parameters))
        unit[: self.num_numbers] = 1 / self.unit_s
        unit[: self.num_bytes] = 1 / self.unit_bytes
        cut = self.program.cut(parameters * unit)
        return Cut(cut.constant * self.unit_s, cut.slopes * unit * self.unit_s, cut.values)

    def shares(self, values: Floats) -> dict[int, tuple[float, float, float]]:
        """Return of each candidate which shares of it stay, are swapped and are dropped."""
        found: dict[int, tuple[float, float, float]] = {}
        for each in self.inner:
            swapped, dropped = float(values[self.swap[each]]), float(values[self.drop[each]])
            found[each] = (1 - swapped - dropped, swapped, dropped)
        return found

    def can_drop(self, candidate: int) -> bool:
        """Tell whether it may be recomputed in this inner part."""
        return self.program.upper(self.drop[candidate]) > 0.0

    def hold(self, candidate: int, shares: tuple[float, float, float]) -> None:
        """Have a candidate stay, be swapped or be dropped, whichever share is 1."""
        for variable, share in zip((self.swap[candidate], self.drop[candidate]), shares[1:], strict=True):
            self.program.hold(variable, share, share)

    def let_go(self, candidate: int) -> None:
        """Take `hold` back."""
        for variable in (self.swap[candidate], self.drop[candidate]):
            self.program.hold(variable, 0.0, self.program.upper(variable))

    def _descendants(self, candidate: int) -> list[int]:
        word, bit = divmod(candidate, WORD)
        return [each for each in self.inner if (int(self.nest.ancestors[each, word]) >> bit) & 1]

    def _add_candidates(self) -> None:
        program = self.program
        for each in self.inner:
            self.swap[each] = program.variable(1.0)
            can = float(bool(self.nest.can_replay[each]))
            self.drop[each] = program.variable(can, cost=float(self.nest.replay_s[each]) / self.unit_s)
            program.row([(self.swap[each], 1.0), (self.drop[each], 1.0)], upper=1.0)
            self._add_there(each, each + REACH, (self.swap[each], self.drop[each]))

    def _add_there(self, each: int, last: int, wholes: tuple[int, int] | tuple[()]) -> None:
        """Add when a candidate may be back for others: it comes once, and stays."""
        next_op = self.nest.next_op
        near = [child for child in self._descendants(each) if each < child <= last and next_op[child] < next_op[each]]
        times = self.times[each] = sorted({int(next_op[child]) for child in near})
        for op in times:
            self.there[each, op] = self.program.variable(1.0), self.program.variable(1.0)
        for kind in range(2):
            chain = [*(self.there[each, op][kind] for op in times), *wholes[kind : kind + 1]]
            for before, after in pairwise(chain):
                self.program.row([(before, 1.0), (after, -1.0)], upper=0.0)

    def _add_makers(self) -> None:
        """Add the decided ones that may be held: who is stays until its first use by a replay inside at least."""
        for each, flag in self.flag_of.items():
            self._add_there(each, self.position + REACH, ())
            if not self.times[each]:
                continue
            for kind, variable in enumerate(self.there[each, self.times[each][-1]]):
                self.program.move(self.program.row([(variable, 1.0)], upper=0.0), flag + 1 + kind, 1.0)
                self.program.move(self.program.row([(variable, 1.0)], lower=0.0), flag + 1 + kind, 1.0)

    def _add_parents(self) -> None:
        next_op = self.nest.next_op
        for child in (*self.flag_of, *self.inner):
            for parent in self.parents[child]:
                if parent < self.position and parent not in self.flag_of:
                    continue
                for op in (*self.times[child], int(next_op[child])):
                    if op >= next_op[parent] or (op == next_op[child] and child < self.position):
                        continue
                    made = self.drop[child] if op == next_op[child] else self.there[child, op][1]
                    self._add_parent(parent, op, made)

    def _add_parent(self, parent: int, op: int, made: int) -> None:
        """Add that a parent is there by an op if a child is."""
        terms = [(made, -1.0)]
        if (parent, op) in self.there:
            terms += [(variable, 1.0) for variable in self.there[parent, op]]
        elif any(time > op for time in self.times[parent]) or self._is_far(parent):
            return  # it may be there without having a variable that says so
        if parent in self.flag_of:
            self.program.move(self.program.row(terms, lower=0.0), self.flag_of[parent], -1.0)
        else:
            self.program.row([*terms, (self.swap[parent], -1.0), (self.drop[parent], -1.0)], lower=-1.0)

    def _is_far(self, candidate: int) -> bool:
        """Tell whether somebody is made from a candidate whom `REACH` leaves out."""
        last = max(candidate, self.position) + REACH
        return any(child > last for child in self._descendants(candidate))

    def _who_stays(self, op: int, *, forward: bool, queued: bool) -> tuple[list[tuple[int, float]], float]:
        """Return terms and a number that add up to the bytes of those who stay or are back at an op in their gap.

        With `queued` those count, too, whose copies have been queued since the edge, by now or later.
        """
        terms: list[tuple[int, float]] = []
        total = 0.0
        copy_s = self.nest.out_s if forward else self.nest.in_s
        for each in self.inner:
            if not (self.nest.last_op[each] < op if forward else self.nest.next_op[each] > op):
                continue
            size = float(self.size[each]) / self.unit_bytes
            total += size
            terms.append((self.drop[each], -size))
            if not (queued and copy_s[each] > 0.0):
                terms.append((self.swap[each], -size))
        for each in () if forward else (*self.flag_of, *self.inner):
            back = [time for time in self.times[each] if time <= op] if self.nest.next_op[each] > op else []
            if back:
                size = float(self.size[each]) / self.unit_bytes
                swapped, dropped = self.there[each, back[-1]]
                terms.append((dropped, size))
                # Of an inner one that is swapped all counts already, whether it is back or on its way.
                if not (queued and copy_s[each] > 0.0 and each >= self.position):
                    terms.append((swapped, size))
        return terms, total

    def _add_memory(self, op: int, look: int, moving: int, waited: int, *, forward: bool) -> list[int]:
        """Add the rows of point 1, and return their numbers: copies as `moving` says, then for each slope."""
        room = (float(self.nest.budget_bytes[0]) - float(self.nest.least_bytes[op])) / self.unit_bytes
        stays, total = self._who_stays(op, forward=forward, queued=False)
        rows = [self.program.row([(moving, 1.0), (self.beyond, -1.0), *stays], upper=room - total)]
        stays, total = self._who_stays(op, forward=forward, queued=True)
        for number, slope in enumerate(SLOPES):
            less = (waited, -float(slope) * self.rates[0 if forward else 1])
            rows.append(self.program.row([less, (self.beyond, -1.0), *stays], upper=room - total))
            self.program.move(rows[-1], EDGE + number * self.num_looks + look, -1.0)
        for row in rows:
            self.program.move(row, 0, -1.0)
        return rows

    def _add_forward(self) -> None:
        program, rate = self.program, self.rates[0]
        released: dict[int, list[int]] = {}
        for each in (*self.pending, *self.inner):
            released.setdefault(int(self.nest.last_op[each]) + 1, []).append(each)
        begin = int(self.nest.forward_end[self.position - 1])
        looks = {int(op): index for index, op in enumerate(self.forward)}
        before, moving, waited = begin, -1, -1
        for op in sorted({begin, *looks, *(op for op in released if begin <= op < self.middle)}):
            now = program.variable(self.most)
            terms = [(now, 1.0)]
            decided: list[tuple[int, float]] = []
            for each in released.get(op, []) if op > begin else []:
                size = float(self.size[each]) / self.unit_bytes
                if each in self.pending:
                    decided.append((self.pending[each] + 1, size))
                else:
                    terms.append((self.swap[each], -size))
            if op in looks:
                wait = program.variable(self.longest, cost=1.0)
                terms.append((wait, rate))
                so_far = program.variable(self.longest)
                row = [(so_far, 1.0), (wait, -1.0)]
                program.row([*row, (waited, -1.0)] if waited >= 0 else row, upper=0.0)
                program.move(program.row([(so_far, 1.0)], lower=0.0), self.num_bytes + looks[op], 1.0)
                waited = so_far
            if moving >= 0:
                terms.append((moving, -1.0))
            passed = float(self.starts_s[op] - self.starts_s[before]) / self.unit_s
            row_of_link = program.row(terms, lower=-rate * passed)
            for parameter, size in decided:
                program.move(row_of_link, parameter, size)
            if moving < 0:
                program.move(row_of_link, 1, 1.0)
            if op in looks:
                rows = self._add_memory(op, looks[op], now, waited, forward=True)
                for each, flag in self.pending.items():
                    size = float(self.size[each]) / self.unit_bytes
                    if self.nest.last_op[each] >= op:  # it is in the load still
                        for row_of_memory in rows:
                            program.move(row_of_memory, flag, size)
                    else:  # its copy is queued behind those under way at the edge
                        for row_of_memory in rows[1:]:
                            program.move(row_of_memory, flag + 1, -size)
            before, moving = op, now

    def _add_backward(self) -> None:
        program, rate, nest = self.program, self.rates[1], self.nest
        queued: dict[int, list[tuple[int, float]]] = {}
        replays: dict[int, list[tuple[int, float]]] = {}
        owed: list[tuple[int, float]] = []
        ops_of = [int(op) for op in nest.next_op]
        several = {op for op in ops_of if ops_of.count(op) > 1}
        later: list[tuple[int, float]] = []  # replays whose time the link may have whenever it helps
        for each in (*self.flag_of, *self.inner):
            size = float(self.size[each]) / self.unit_bytes if nest.in_s[each] > 0.0 else 0.0
            replay = float(nest.help_s[each]) / self.unit_s
            let_go = [(op, *self.there[each, op]) for op in self.times[each]]
            if each >= self.position:
                let_go.append((int(nest.next_op[each]), self.swap[each], self.drop[each]))
            is_far = self._is_far(each)
            if is_far and not let_go:
                owed.append((self.flag_of[each] + 2, replay))
            # Of what is there at an op, that is let go which is not there at the one before it, further in.
            for place, (op, swapped, dropped) in enumerate(let_go):
                pulled = queued.setdefault(op, [])
                if op not in several or op == nest.next_op[each]:  # of two replays for one op one's copies are free
                    pulled.append((swapped, size))
                if place or not is_far:
                    replays.setdefault(op, []).append((dropped, replay))
                else:
                    later.append((dropped, -replay))
                if place:
                    if op not in several or op == nest.next_op[each]:
                        pulled.append((let_go[place - 1][1], -size))
                    replays[op].append((let_go[place - 1][2], -replay))
        help_s: list[tuple[int, float]] = []
        looks = {int(op): index for index, op in enumerate(self.backward)}
        top = int(nest.next_op[self.position - 1]) - 1
        ops = {top, *looks, *(op - 1 for op in queued if self.middle < op <= top)}
        before, moving, waited = top, -1, -1
        for op in sorted((op for op in ops if op >= self.middle), reverse=True):
            now, helped = program.variable(self.most), program.variable(self.longest)
            help_s.append((helped, 1.0))
            given = [(helped, 1.0), *replays.get(op + 1, [])]
            terms = [(now, 1.0), *((variable, rate * factor) for variable, factor in given)]
            terms += [(variable, -factor) for variable, factor in queued.get(op + 1, [])]
            if op in looks:
                wait = program.variable(self.longest, cost=1.0)
                terms.append((wait, rate))
                given.append((wait, 1.0))
            so_far = program.variable(self.longest)
            row = [(so_far, 1.0), *((variable, -factor) for variable, factor in given)]
            program.row([*row, (waited, -1.0)] if waited >= 0 else row, upper=0.0)
            waited = so_far
            if moving >= 0:
                terms.append((moving, -1.0))
            # A copy under way at an op may go on while it runs, and all ops on the way here.
            passed = float(self.starts_s[before + 1] - self.starts_s[op + 1]) / self.unit_s
            row_of_link = program.row(terms, lower=-rate * passed)
            if moving < 0:
                program.move(row_of_link, 2, 1.0)
            if op in looks:
                look = len(self.forward) + looks[op]
                program.move(program.row([(so_far, 1.0)], lower=0.0), self.num_bytes + look, 1.0)
                self._add_memory(op, look, now, so_far, forward=False)
            before, moving = op, now
        row_of_help = program.row([*help_s, *later], upper=0.0)
        for parameter, replay in owed:
            program.move(row_of_help, parameter, replay)


def _slice(ends: Ints, items: Ints, each: int) -> list[int]:
    return [int(item) for item in items[ends[each] : ends[each + 1]]]
