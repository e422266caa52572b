"""The simulator's semantics once more, slowly and in the plainest way: what the compiled one has to equal.

Written from `docs/design/0008-the-simulator.md`. Sets and dictionaries instead of arrays, and every condition looked up
where it is stated: whether a swap-in may be issued is asked of each later moment, one by one.
"""

from collections import defaultdict
from itertools import pairwise

from torchdelta.simulate.model import Code
from torchdelta.trace.model import BEFORE_STEP, storage_versions, versions_over_end


class Reference:
    """One simulation."""

    def __init__(self, problem, codes, budget_bytes):
        self.trace, self.machine, self.options = problem.trace, problem.machine, problem.options
        self.size = [buffer.size_bytes for buffer in self.trace.buffers]
        self.away_gaps = [(gap, Code(code)) for gap, code in zip(problem.gaps, codes, strict=True) if code]
        self.over_end = {
            gap: versions_over_end(self.trace)[gap.buffer_id].id
            for gap, _ in self.away_gaps
            if gap.next_use_op >= len(self.trace.ops)
        }  # what comes back is the first version
        self.budget_bytes = budget_bytes
        self.old_version, self.overwritten = {}, set()
        for versions in storage_versions(self.trace).values():
            for old, new in pairwise(versions):
                self.old_version[new.id] = old.id
                self.overwritten.add(old.id)
        self.is_possible = True
        self.replay_s = defaultdict(float)
        self.swap_ins = []  # (gap, code, op before which it must be there)
        self.needs = []
        self.run_contents()
        self.settle()

    def lives_across(self, id_, op):
        """Whether a buffer is there before an op and until it, in the plain step."""
        buffer = self.trace.buffers[id_]
        return buffer.birth_op < op and (buffer.death_op > op or (buffer.death_op == op and id_ in self.overwritten))

    def run_contents(self):
        """Find the bytes needed at each moment."""
        away = {self.over_end[gap]: (gap, code) for gap, code in self.away_gaps if gap in self.over_end}
        for op in self.trace.ops:
            for gap, code in self.away_gaps:
                if gap.last_use_op == op.index - 1:
                    away[gap.buffer_id] = (gap, code)
            targets = []
            ending = sorted(
                (gap for gap, _ in self.away_gaps if gap.next_use_op % len(self.trace.ops) == op.index),
                key=lambda gap: (gap.last_use_op, gap.buffer_id),
            )
            for gap in ending:
                id_ = self.over_end.get(gap, gap.buffer_id)
                if away.get(id_, (None, None))[0] == gap:
                    code = away[id_][1]
                    if code in {Code.SWAP, Code.DISK}:
                        self.swap_ins.append((gap, code, op.index))
                        del away[id_]
                    else:
                        targets.append(gap.buffer_id)
            replay_bytes = self.replay(op.index, targets, away) if targets else 0
            plain = sum(b.size_bytes for b in self.trace.buffers if b.birth_op <= op.index < b.death_op)
            gone = sum(self.size[id_] for id_ in away)
            self.needs.append(max(plain + op.workspace_bytes - gone, replay_bytes))

    def replay(self, at_op, targets, away):
        """Play a replay, and return its highest moment."""
        chain, wanted = set(), list(targets)
        while wanted:
            target = wanted.pop()
            producer = self.trace.buffers[target].birth_op
            is_statistic = producer != BEFORE_STEP and self.old_version.get(target) in self.own_statistics(producer)
            if producer == BEFORE_STEP or is_statistic or not self.trace.ops[producer].recomputable:
                self.is_possible = False
                continue
            if producer in chain:
                continue
            chain.add(producer)
            for id_ in self.inputs(producer):
                if self.lives_across(id_, at_op):
                    if id_ not in away:
                        continue
                    gap, code = away[id_]
                    if gap in self.over_end:
                        self.is_possible = False  # it would be there at the end of the step
                        continue
                    if code in {Code.SWAP, Code.DISK}:
                        self.swap_ins.append((gap, code, at_op))
                        del away[id_]
                        continue
                wanted.append(id_)
        there = {b.id for b in self.trace.buffers if self.lives_across(b.id, at_op)} - away.keys()
        transient = set()
        highest = 0
        for producer in sorted(chain):
            for id_ in self.trace.ops[producer].writes:
                transient.discard(self.old_version.get(id_))
                gap, code = away.get(id_, (None, None))
                if code == Code.RECOMPUTE or (code == Code.AGAIN and gap.next_use_op == at_op):
                    there.add(id_)
                    del away[id_]
                else:
                    transient.add(id_)
            held = sum(self.size[id_] for id_ in there) + sum(self.size[id_] for id_ in transient)
            highest = max(highest, held + self.trace.ops[producer].workspace_bytes)
            later = {id_ for index in chain if index > producer for id_ in self.inputs(index)}
            transient = (transient & later) - there  # what is there already is read where it is
            self.replay_s[at_op] += self.trace.ops[producer].time_s + self.machine.replay_compute_s
        return highest

    def inputs(self, index):
        """What a replayed op has to find."""
        return [id_ for id_ in self.trace.ops[index].reads if id_ not in self.own_statistics(index)]

    def own_statistics(self, index):
        """What a batch norm reads and writes over: its other outputs do not depend on it, and no replay makes it."""
        op = self.trace.ops[index]
        overwritten = {self.old_version.get(id_) for id_ in op.writes}
        return overwritten & set(op.reads) if "batch_norm" in op.name else set()

    def may_issue(self, number, op):
        """Whether a swap-in can take its memory at an op and keep it until its use, after all before it."""
        used_at = self.swap_ins[number][2]
        for moment in range(op, used_at):
            waiting = sum(self.size[gap.buffer_id] for gap, _, needed in self.swap_ins[: number + 1] if needed > moment)
            if self.needs[moment] + waiting > self.budget_bytes:
                return False
        return True

    def transfer_s(self, code, size, inward):
        """Seconds of one transfer."""
        m = self.machine
        if code == Code.SWAP:
            return m.link_latency_s + size / (m.host_in_bytes_per_s if inward else m.host_out_bytes_per_s)
        return m.disk_latency_s + size / (m.disk_read_bytes_per_s if inward else m.disk_write_bytes_per_s)

    def end(self, start, work_s, others):
        """When a copy ends, beside those of the other direction that were queued before it."""
        now, share = start, max(2 * self.machine.both_ways_factor - 1, 0.0)
        for busy_from, busy_until in others:
            alone_s = max(busy_from - now, 0.0)
            if work_s <= alone_s:
                break
            work_s, now = work_s - alone_s, now + alone_s
            both_s = max(busy_until - now, 0.0)
            if work_s <= both_s * share:
                return now + work_s / share
            work_s, now = work_s - both_s * share, now + both_s
        return now + work_s

    def settle(self):
        """Repeat the step until it leaves the copies on their way that it found; at last it waits for all of them."""
        carried = {}
        for _ in range(4):
            left = self.run_clock(carried)
            if left.keys() == carried.keys() and all(left[gap] <= carried[gap] for gap in left):
                break
            carried = {gap: left_s + 1e-9 * self.end_s for gap, left_s in left.items()}
        else:
            self.run_clock({}, waits_at_end=True)

    def run_clock(self, carried, *, waits_at_end=False):
        """Run the queues, and return what is on its way at the end, and for how long."""
        outs, ins = [], []  # (start, end) of each copy to and from the host
        now, self.stall_s, self.totals = 0.0, 0.0, []
        out_free, in_free, disk_free = 0.0, 0.0, 0.0
        pending = [(end, gap) for gap, end in carried.items()]  # (end of the copy, gap)
        for gap, code in self.away_gaps:
            if gap in carried and code == Code.SWAP:
                outs.append((out_free, carried[gap]))
                out_free = carried[gap]
            elif gap in carried:
                disk_free = carried[gap]
        out_end = {gap: carried.get(gap, 0.0) for gap in self.over_end}
        issued = 0
        arrivals = {}
        for op in self.trace.ops:
            index = op.index
            ahead = sum(self.size[self.swap_ins[n][0].buffer_id] for n in range(issued) if self.swap_ins[n][2] > index)
            pending = [item for item in pending if item[0] > now]
            # The old place of what is wanted back here is free before it comes back: to wait for it frees nothing.
            wanted = {gap for gap, _, needed in self.swap_ins[issued:] if needed == index}

            def going(pending, wanted=wanted):
                return sum(self.size[g.buffer_id] for _, g in pending if g not in wanted)

            while going(pending) and self.needs[index] + ahead + going(pending) > self.budget_bytes:
                end = min(pending, key=lambda item: item[0])[0]
                self.stall_s += end - now
                now = end
                pending = [item for item in pending if item[0] > now]
            total = self.needs[index] + ahead + going(pending)
            while issued < len(self.swap_ins):
                gap, code, needed = self.swap_ins[issued]
                size = self.size[gap.buffer_id]
                if needed > index:
                    if not self.options.prefetch or (gap.last_use_op >= index and gap not in self.over_end):
                        break
                    if out_end[gap] > now:
                        break
                    if not self.may_issue(issued, index) or total + size > self.budget_bytes:
                        break
                    total += size
                start = max(in_free if code == Code.SWAP else disk_free, now, out_end[gap])
                end = start + self.transfer_s(code, size, inward=True)
                if code == Code.SWAP:
                    end = self.end(start, end - start, outs)
                    ins.append((start, end))
                    in_free = end
                else:
                    disk_free = end
                arrivals[issued] = end
                issued += 1
                if self.options.synchronous:
                    self.stall_s += end - now
                    now = end
                else:
                    now += size * self.machine.in_compute_s_per_byte + self.machine.copy_compute_s
            self.totals.append(total)
            for number, (_, _, needed) in enumerate(self.swap_ins):
                if needed == index and arrivals[number] > now:
                    self.stall_s += arrivals[number] - now
                    now = arrivals[number]
            now += self.replay_s[index] + op.time_s
            for gap, code in self.away_gaps:
                if gap.last_use_op == index and code in {Code.SWAP, Code.DISK}:
                    start = max(out_free if code == Code.SWAP else disk_free, now)
                    end = start + self.transfer_s(code, gap.size_bytes, inward=False)
                    if code == Code.SWAP:
                        end = self.end(start, end - start, ins)
                        outs.append((start, end))
                        out_free = end
                    else:
                        disk_free = end
                    out_end[gap] = end
                    pending.append((end, gap))
                    if self.options.synchronous:
                        self.stall_s += end - now
                        now = end
                    else:
                        now += gap.size_bytes * self.machine.out_compute_s_per_byte + self.machine.copy_compute_s
        left = {gap: out_end[gap] - now for gap in self.over_end if out_end[gap] > now}
        if waits_at_end:
            self.stall_s += max(left.values())
            now += max(left.values())
        self.end_s = now
        self.time_s = now if self.is_possible else float("inf")
        return left
