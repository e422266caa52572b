"""Peak and time of a plan, from `docs/plan-format.md` and `docs/trace-format.md` alone: nothing of torchdelta.

Slow and plain on purpose. `simulate(trace_path, plan_path)` reads both files and returns bytes and seconds.
"""

import gzip
import json


def read(path):
    """Return the header of a file and its records by kind."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines]
    kinds = {}
    for record in records:
        kinds.setdefault(record["record"], []).append(record)
    counted = {"num_absences": "absence", "num_replays": "replay", "num_ops": "op", "num_buffers": "buffer"}
    for field, kind in counted.items():
        if field in kinds["end"][0]:
            assert kinds["end"][0][field] == len(kinds.get(kind, []))
    return records[0], kinds


BATCH_NORMS = {
    "native_batch_norm",
    "cudnn_batch_norm",
    "miopen_batch_norm",
    "_native_batch_norm_legit",
    "_batch_norm_with_update",
    "_batch_norm_with_update_functional",
}


class Step:
    """A step under a plan."""

    def __init__(self, trace_path, plan_path):
        _, trace = read(trace_path)
        self.header, plan = read(plan_path)
        self.ops, self.buffers = trace["op"], trace.get("buffer", [])
        self.num_ops = len(self.ops)
        self.size = [buffer["size_bytes"] for buffer in self.buffers]
        self.storage = [buffer["storage_id"] for buffer in self.buffers]
        self.absences = plan.get("absence", [])
        self.replays = {replay["at_op"]: replay for replay in plan.get("replay", [])}
        for absence in self.absences:
            out_op = absence.get("out_op")
            absence["out_op"] = absence["last_use_op"] if out_op is None else out_op
        self.swaps = [absence for absence in self.absences if absence["action"] == "swap"]

    def is_over_end(self, absence):
        """Tell whether the next use is in the following step."""
        return absence["next_use_op"] >= self.num_ops

    # What is on the device.

    def moves(self):
        """Return (buffer, leaves at, returns at, action) within this step."""
        found = []
        for absence in self.absences:
            leave, back, action = absence["leave_op"], absence["return_op"], absence["action"]
            if action == "swap" and leave == back:
                continue
            found.append((absence["buffer_id"], leave, back, action))
            if self.is_over_end(absence):
                same = [b for b in self.buffers if b["storage_id"] == self.storage[absence["buffer_id"]]]
                first = next(b["id"] for b in same if b["birth_op"] == -1)
                found.append((first, max(leave - self.num_ops, 0), back - self.num_ops, action))
        return [(id_, leave, back, action) for id_, leave, back, action in found if leave < back or action != "swap"]

    def peak_bytes(self):
        """Return the most bytes at any moment."""
        moves, deaths = self.moves(), {}
        for buffer in self.buffers:
            deaths.setdefault(buffer["death_op"], []).append(buffer["id"])
        self.here = {buffer["id"] for buffer in self.buffers if buffer["birth_op"] == -1}
        self.kept = {}
        highest = 0
        for i, op in enumerate(self.ops):
            written = {self.storage[id_] for id_ in op["writes"]}
            dying = deaths.get(i, [])
            self.here -= {id_ for id_ in dying if self.storage[id_] not in written}
            gone = {id_ for id_, until in self.kept.items() if until == i}
            self.here -= gone
            self.kept = {id_: until for id_, until in self.kept.items() if id_ not in gone}
            self.here -= {id_ for id_, leave, _, _ in moves if leave == i}
            back = [(id_, action) for id_, _, returns, action in moves if returns == i]
            for id_, _ in back:
                self.kept.pop(id_, None)
            self.here |= {id_ for id_, action in back if action == "swap"}
            if i in self.replays:
                stays = {id_ for id_, action in back if action == "recompute"}
                highest = max(highest, self.replay_bytes(self.replays[i], stays))
            self.here -= {id_ for id_ in dying if self.storage[id_] in written}
            self.here |= set(op["writes"])
            highest = max(highest, self.bytes_here() + op["workspace_bytes"])
        return highest

    def statistics(self, op):
        """Return the storages of the statistics that a batch norm brings up to date."""
        if op["name"].removeprefix("aten.").split(".")[0] not in BATCH_NORMS:
            return set()
        old = {self.storage[id_] for id_ in op["reads"] if self.buffers[id_]["death_op"] == op["index"]}
        return old & {self.storage[id_] for id_ in op["writes"]}

    def replay_reads(self, op):
        """Return what a replay of an op reads."""
        own = self.statistics(op)
        return [id_ for id_ in op["reads"] if self.storage[id_] not in own]

    def bytes_here(self):
        """Return the bytes of all buffers that are there."""
        return sum(self.size[id_] for id_ in self.here)

    def replay_bytes(self, replay, stays):
        """Run a replay and return its most bytes."""
        highest, made = 0, set()
        keeps = {keep["buffer_id"]: keep["until_op"] for keep in replay.get("keeps", [])}
        for place, index in enumerate(replay["ops"]):
            op = self.ops[index]
            twice = [id_ for id_ in op["writes"] if id_ in self.here]
            new = [id_ for id_ in op["writes"] if id_ not in self.here]
            over = {self.storage[id_] for id_ in op["writes"]}
            for id_ in [*made, *self.kept]:
                if self.buffers[id_]["death_op"] == index and self.storage[id_] in over:
                    self.here.discard(id_)
                    made.discard(id_)
                    self.kept.pop(id_, None)
            self.here |= set(new)
            made |= set(new)
            inside = op["workspace_bytes"] + sum(self.size[id_] for id_ in twice)
            highest = max(highest, self.bytes_here() + inside)
            later = {id_ for after in replay["ops"][place + 1 :] for id_ in self.replay_reads(self.ops[after])}
            scratch = {id_ for id_ in op["writes"] if self.storage[id_] in self.statistics(op)}
            done = made - later - (stays | keeps.keys()) | (made & scratch - later)
            self.here -= done
            made -= done
        self.kept.update({id_: until for id_, until in keeps.items() if id_ in made})
        return highest

    # What it takes.

    def time_s(self):
        """Return the seconds of the step."""
        carried = [absence.get("carried_s", 0.0) for absence in self.swaps]
        for _ in range(4):
            end_s, left = self.round(carried)
            if all(after <= before for after, before in zip(left, carried, strict=True)):
                return end_s
            carried = [after + 1e-9 * end_s if after else 0.0 for after in left]
        return self.round([0.0] * len(carried))[0]

    def round(self, carried):
        """Run the step once; return its seconds, and what it leaves of each copy out that it does not wait for."""
        links, n = self.header["links"], self.num_ops
        share = max(2 * links.get("both_ways_factor", 1.0) - 1, 0)
        busy = dict.fromkeys(("out", "in", "disk"), (0.0, 0.0))  # since when and until when without a pause
        out_end, in_end = {}, {}
        swaps = list(enumerate(self.swaps))
        for number, absence in swaps:
            if carried[number]:
                queue = "disk" if absence["tier"] == "disk" else "out"
                busy[queue] = (0.0, max(busy[queue][1], carried[number]))

        def copy(absence, way, earliest):
            size, disk = self.size[absence["buffer_id"]], absence["tier"] == "disk"
            queue, other = ("disk", None) if disk else (way, "in" if way == "out" else "out")
            rate = links[("disk_write" if way == "out" else "disk_read") + "_bytes_per_s"] if disk else None
            rate = rate or links[f"host_{way}_bytes_per_s"]
            w = links["disk_latency_s" if disk else "link_latency_s"] + size / rate
            since, until = busy[queue]
            s = max(earliest, until)
            end = s + w
            if other is not None and share < 1:
                a, b = busy[other]
                alone, both = min(max(a - s, 0), w), max(b - max(s, a), 0)
                left = w - alone
                end = s + alone + both + left - both * share if left else s + alone
                if 0 < left <= both * share:
                    end = s + alone + left / share
            busy[queue] = (since if s == until else s, end)
            return end

        def taken(absence, way):
            a_byte, a_copy = links.get(f"{way}_compute_s_per_byte", 0.0), links.get("copy_compute_s", 0.0)
            return self.size[absence["buffer_id"]] * a_byte + a_copy

        now, synchronous = 0.0, self.header.get("synchronous", False)
        for i, op in enumerate(self.ops):
            for number, absence in swaps:
                leave, back = absence["leave_op"], absence["return_op"]
                if leave == i and leave < back:
                    now = max(now, out_end[number])
                elif leave - n == i and leave < back:
                    now = max(now, carried[number])
            due = [(number, absence) for number, absence in swaps if absence["return_op"] in (i, i + n)]
            order = ("return_rank", "last_use_op", "buffer_id")
            for number, absence in sorted(due, key=lambda item: [item[1].get(field, 0) for field in order]):
                gone = carried[number] if absence["return_op"] >= n else out_end[number]
                in_end[number] = copy(absence, "in", max(now, gone))
                now = max(now, in_end[number]) if synchronous else now + taken(absence, "in")
            for number, absence in swaps:
                if absence["next_use_op"] == i or (absence["next_use_op"] == i + n and absence["return_op"] >= n):
                    now = max(now, in_end[number])
            again = self.replays[i]["ops"] if i in self.replays else []
            extra_s = links.get("replay_compute_s", 0.0)
            now += sum(self.ops[index]["time_s"] + extra_s for index in again) + op["time_s"]
            due = [(number, absence) for number, absence in swaps if absence["out_op"] == i]
            for number, absence in sorted(due, key=lambda item: (item[1]["last_use_op"], item[1]["buffer_id"])):
                out_end[number] = copy(absence, "out", now)
                now = max(now, out_end[number]) if synchronous else now + taken(absence, "out")
        for number, absence in swaps:
            if self.is_over_end(absence):
                now = now if carried[number] else max(now, out_end[number])
                now = max(now, in_end[number]) if absence["return_op"] < n else now
        return now, [max(out_end[k] - now, 0.0) if before else 0.0 for k, before in enumerate(carried)]


def simulate(trace_path, plan_path):
    """Return the peak in bytes and the time in seconds of a priced trace under a plan."""
    step = Step(trace_path, plan_path)
    return step.peak_bytes(), step.time_s()
