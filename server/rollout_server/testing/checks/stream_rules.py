"""What trainer_service.proto has a server do on a stream, as a strict trainer checks it item by item. No I/O."""

from osmosis.rollout.v1.trainer_service_pb2 import TrainResponse, TrainWelcome

_NUMBERED = frozenset({"started", "refused", "ask", "outcome"})


class TrainRules:
    """`faults` names what was wrong, in the order in which it came. `seen` is the last numbered item that was taken in.

    `credit` is how many asks may be under way at once.
    """

    def __init__(self, credit: int) -> None:
        self.faults: list[str] = []
        self.seen = 0
        self.under_way: dict[str, str] = {}
        self._credit = credit
        self._resumed = False
        self._expected_spans: list[str] = []
        self._running: set[str] = set()
        self._ended: set[str] = set()
        self._acknowledged = 0

    def begin(self, welcome: TrainWelcome, stream_id: str, sent: int) -> None:
        """A connection began; `stream_id` is what was asked for, `sent` the last item that was ever sent."""
        self._resumed = bool(stream_id)
        if not welcome.stream_id or (stream_id and welcome.stream_id != stream_id):
            self.faults.append(f"welcome: the stream is {welcome.stream_id!r}, asked for was {stream_id!r}")
        if not self._acknowledged <= welcome.last_seen <= sent:
            self.faults.append(
                f"welcome: last_seen is {welcome.last_seen}, {sent} items were sent and {self._acknowledged} acknowledged"
            )

    def expect_started(self, rollout_ids: list[str]) -> None:
        """A start was sent for these rollouts."""
        self._expected_spans += rollout_ids

    def end_request(self, turn_key: str) -> None:
        """An ask was answered or rejected."""
        self.under_way.pop(turn_key, None)

    def take(self, item: TrainResponse, sent: int) -> bool:
        """Looks at an item; whether it is a new one."""
        kind = item.WhichOneof("item") or "nothing"
        if (kind in _NUMBERED) is not bool(item.sequence):
            self.faults.append(f"{kind}: has sequence {item.sequence}")
        if item.sequence and item.sequence <= self.seen:
            self.faults.append(f"{kind}: item {item.sequence} came again, and {self.seen} was seen")
            return False
        if item.sequence > self.seen + 1 and not self._resumed:
            self.faults.append(f"{kind}: item {item.sequence} came behind {self.seen}")
        self.seen = item.sequence or self.seen
        self._check_item(kind, item, sent)
        return True

    def _check_item(self, kind: str, item: TrainResponse, sent: int) -> None:
        match kind:
            case "welcome":
                self.faults.append("welcome: came again")
            case "started":
                self._check_started(item)
            case "acknowledge":
                if not self._acknowledged <= item.acknowledge.sequence <= sent:
                    self.faults.append(
                        f"acknowledge: {item.acknowledge.sequence} behind {self._acknowledged}, sent were {sent}"
                    )
                self._acknowledged = item.acknowledge.sequence
            case "ask":
                self._check_rollout(kind, item.ask.uid)
                self._check_completion(item)
            case "event":
                self._check_rollout(kind, item.event.uid)
            case "outcome":
                uid = item.outcome.rollout.uid
                self._check_rollout(kind, uid)
                self._ended.add(uid)
                self.under_way = {key: owner for key, owner in self.under_way.items() if owner != uid}

    def _check_started(self, item: TrainResponse) -> None:
        rollout = item.started.rollout
        wanted = self._expected_spans.pop(0) if self._expected_spans else None
        if rollout.spec.rollout_id != wanted:
            self.faults.append(f"started: {rollout.spec.rollout_id!r}, and {wanted!r} is next")
        self._running.add(rollout.uid)

    def _check_rollout(self, kind: str, uid: str) -> None:
        if uid not in self._running:
            self.faults.append(f"{kind}: rollout {uid!r} was not started on this stream")
        if uid in self._ended:
            self.faults.append(f"{kind}: came for rollout {uid!r} behind its outcome")

    def _check_completion(self, item: TrainResponse) -> None:
        key = item.ask.turn_key
        if key in self.under_way:
            self.faults.append(f"ask: {key!r} is under way already")
        self.under_way[key] = item.ask.uid
        if len(self.under_way) > self._credit:
            self.faults.append(f"ask: {len(self.under_way)} are under way, and there is credit for {self._credit}")

    def drop_expected(self, rollout_ids: list[str]) -> None:
        """A start was refused, so these are not started."""
        self._expected_spans = [each for each in self._expected_spans if each not in rollout_ids]
